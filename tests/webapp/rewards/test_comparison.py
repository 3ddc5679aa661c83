"""Old rewards against new: histogram, what changed, which groups teach nothing; and any two versions side by side."""

from __future__ import annotations

import re

import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.rewards import samples, services, testing
from webapp.rewards.comparison import BINS, Comparison, histogram
from webapp.rewards.forms import TryForm
from webapp.rollouts.models import StoredRollout

values = st.lists(st.floats(-1e6, 1e6), max_size=60)


def returning(expression: str, name: str = "mine") -> str:
    return f"def {name}(completions, **columns):\n    return {expression}\n"


@given(values, values)
def test_a_histogram_counts_every_reward_once(old: list[float], new: list[float]) -> None:
    bins = histogram(old, new)
    assert (sum(item.old for item in bins), sum(item.new for item in bins)) == (len(old), len(new))
    assert len(bins) <= BINS
    if bins:
        assert max(max(item.old_height, item.new_height) for item in bins) == 100
        assert bins[0].low == min(old + new)


def test_few_values_get_a_bar_each_and_many_get_bins() -> None:
    few = histogram([0.0, 1.0, 1.0], [0.1])
    assert [(item.low, item.old, item.new, item.exact) for item in few] == [
        (0.0, 1, 0, True), (0.1, 0, 1, True), (1.0, 2, 0, True),
    ]  # fmt: skip
    many = histogram([index / 100 for index in range(100)], [])
    assert len(many) == BINS
    assert all(7 <= item.old <= 10 for item in many)


def test_what_changed_and_what_teaches_nothing_is_counted() -> None:
    found = Comparison.of([[(0.0, 1.0), (1.0, 1.0)], [(0.5, 0.5), (0.5, None)], [(None, 0.2), (0.1, 0.4)]])
    assert (found.count, found.changed, found.groups) == (6, 3, 3)
    assert (found.old_flat, found.new_flat) == (2, 2)
    assert (found.old_mean, found.new_mean) == (pytest.approx(0.42), pytest.approx(0.62))
    assert Comparison.of([]).new_mean is None


@pytest.mark.django_db
def test_a_test_on_stored_rollouts_compares_with_what_the_run_gave(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, steps=6)
    source = returning("[float('9' in c[-1]['content']) for c in completions]")
    form = {"source": source, "on": "stored", "run": str(run.pk), "groups": "10"}
    page = as_ada.post("/rewards/test/", form, headers={"HX-Request": "true"}).content.decode()
    assert page.count('data-testid="test-values"') == 10
    assert 'data-testid="histogram"' in page
    assert "the run&#x27;s reward in all" in page or "the run's reward in all" in page
    rollouts = list(StoredRollout.objects.filter(run=run).order_by("-id")[:80])
    old = [rollout.reward or 0.0 for rollout in rollouts]
    new = [float("9" in rollout.data["completion"][0]["content"]) for rollout in rollouts]
    changed = sum(before != after for before, after in zip(old, new, strict=True))
    assert f"<b>{changed}</b>" in page
    title = re.search(r'title="0: (\d+) before, (\d+) now"', page)
    assert title is not None
    assert [int(part) for part in title.groups()] == [old.count(0.0), new.count(0.0)]


@pytest.mark.django_db
def test_a_function_is_compared_with_its_own_rewards_of_the_run(ada: User) -> None:
    run = seed.make_run(ada, steps=2)
    for rollout in StoredRollout.objects.filter(run=run):
        rollout.data["rewards"] = {"mine": 0.25, "other": 0.5}
        rollout.save()
    form = TryForm({"on": "stored", "run": str(run.pk), "groups": "2"})
    assert form.is_valid()
    outcome = testing.run_test(returning("[0.25] * len(completions)"), form)
    assert outcome.compared == "mine"
    assert (outcome.comparison.changed, outcome.comparison.old_mean) == (0, 0.25)
    assert samples.stored(run, None, 2, "unknown")[0].compared == ""


@pytest.mark.django_db
@pytest.mark.parametrize("groups, words", [("0", "greater than or equal to 1"), ("65", "less than or equal to 64")])
def test_a_number_of_groups_out_of_bounds_is_said(as_ada: Client, groups: str, words: str) -> None:
    form = {"source": returning("[]"), "on": "pasted", "groups": groups}
    page = as_ada.post("/rewards/test/", form, headers={"HX-Request": "true"}).content.decode()
    assert f"Groups: Ensure this value is {words}." in page


@pytest.mark.django_db
def test_any_two_versions_are_compared_and_their_authors_named(as_ada: Client, ada: User, admin: User) -> None:
    function = services.create_function(returning("[1]"), "", ada)
    services.add_version(function, returning("[2]"), "two", admin)
    services.add_version(function, returning("[3]"), "three", ada)
    newest = as_ada.get("/rewards/mine/").content.decode()
    assert ("-    return [2]" in newest, "-    return [1]" in newest) == (True, False)
    assert "root wrote version 2, ada version 3" in newest
    first = as_ada.get("/rewards/mine/v3/", {"against": "1"}).content.decode()
    assert ("-    return [1]" in first, "+    return [3]" in first) == (True, True)
    backwards = as_ada.get("/rewards/mine/v1/", {"against": "3"}).content.decode()
    assert ("-    return [3]" in backwards, "+    return [1]" in backwards) == (True, True)
    for nonsense in ("9", "x", "3"):
        assert "-    return [2]" in as_ada.get("/rewards/mine/v3/", {"against": nonsense}).content.decode()
