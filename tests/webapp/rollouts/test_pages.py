"""Stored rollouts: a group side by side, the best first, and always as text."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.rollouts.models import StoredRollout
from webapp.runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, steps=4)


def test_the_newest_step_is_shown_first_and_others_by_choice(as_ada: Client, run: Run) -> None:
    page = as_ada.get(f"/runs/{run.pk}/rollouts/").content.decode()
    assert "<option selected>3</option>" in page
    assert page.count('data-testid="group"') == 2
    earlier = as_ada.get(f"/runs/{run.pk}/rollouts/?step=1").content.decode()
    assert "Row 2" in earlier
    assert "Row 3" in earlier


def test_a_group_is_sorted_by_reward_with_unscored_rollouts_last(as_ada: Client, run: Run) -> None:
    group = StoredRollout.objects.filter(run=run, group_id="3-0").order_by("id")
    for rollout, reward in zip(group, [0.2, None, 0.9, 0.5, 0.1, 0.7, 0.3, 0.6], strict=True):
        StoredRollout.objects.filter(pk=rollout.pk).update(reward=reward)
    page = as_ada.get(f"/runs/{run.pk}/rollouts/?step=3").content.decode()
    first = page.split('data-testid="group"')[1]
    shown = re.findall(r'class="reward-value[^"]*">([^<]+)<', first)
    assert shown == ["0.900", "0.700", "0.600", "0.500", "0.300", "0.200", "0.100", "unscored"]


def test_what_a_model_wrote_is_text(as_ada: Client, run: Run) -> None:
    rollout = StoredRollout.objects.filter(run=run, step=3).first()
    assert rollout is not None
    rollout.data["completion"] = [{"role": "assistant", "content": "<img src=x onerror=alert(1)>"}]
    rollout.save()
    page = as_ada.get(f"/runs/{run.pk}/rollouts/").content.decode()
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page


@pytest.mark.parametrize(
    "completion", [None, "plain text", [], ["just text"], [{"role": "assistant"}], [{"content": None}]]
)
def test_odd_completions_do_not_break_the_page(as_ada: Client, run: Run, completion: object) -> None:
    rollout = StoredRollout.objects.filter(run=run, step=3).first()
    assert rollout is not None
    rollout.data["completion"] = completion
    rollout.save()
    assert as_ada.get(f"/runs/{run.pk}/rollouts/").status_code == 200


def test_search_finds_text_of_all_steps(as_ada: Client, run: Run) -> None:
    rollout = StoredRollout.objects.filter(run=run, step=1).first()
    assert rollout is not None
    rollout.data["completion"] = [{"role": "assistant", "content": "a rare wörd"}]
    rollout.save()
    for words in ("rare", "wörd", "RARE"):
        page = as_ada.get(f"/runs/{run.pk}/rollouts/", {"search": words}).content.decode()
        assert page.count('data-testid="group"') == 1, words
        assert "a rare wörd" in page
    assert "Nothing matches" in as_ada.get(f"/runs/{run.pk}/rollouts/", {"search": "nobody said this"}).content.decode()


def test_rollouts_of_other_runs_stay_there(as_ada: Client, ada: User, run: Run) -> None:
    other = seed.make_run(ada, state="starting", steps=0)
    assert "No rollouts yet" in as_ada.get(f"/runs/{other.pk}/rollouts/").content.decode()
