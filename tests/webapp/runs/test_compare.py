"""Comparing runs: what differs is shown, what is equal is hidden, and the address holds the whole view."""

from __future__ import annotations

import csv
import re
from urllib.parse import parse_qs, urlsplit

import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.runs.compare import settings_of
from webapp.runs.models import Run
from webapp.runs.sample import sample_spec

pytestmark = [
    pytest.mark.django_db, pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators"),
]  # fmt: skip


def runs_of(owner: User, *rates: float) -> list[Run]:
    spec = sample_spec()
    made = []
    for rate in rates:
        training = spec.training.model_copy(update={"learning_rate": rate})
        made.append(seed.make_run(owner, f"rate {rate}", spec=spec.model_copy(update={"training": training}), steps=3))
    return made


def query(runs: list[Run]) -> str:
    return "&".join(f"run={run.pk}" for run in runs)


def test_only_settings_that_differ_are_shown(as_ada: Client, ada: User) -> None:
    runs = runs_of(ada, 1e-4, 2e-4, 1e-4)
    page = as_ada.get(f"/runs/compare/?{query(runs)}").content.decode()
    assert re.findall(r'class="differs"><th scope="row" class="mono">([^<]+)', page) == [
        "name",
        "training.learning_rate",
    ]
    assert "rollout.temperature" not in page
    everything = as_ada.get(f"/runs/compare/?{query(runs)}&all=1").content.decode()
    assert "rollout.temperature" in everything


def test_a_setting_that_only_one_spec_has_differs() -> None:
    rows = settings_of([{"a": 1, "section": {"b": 2}}, {"a": 1}, {"a": 1, "section": {"b": 2}}])
    assert [(row["path"], row["values"], row["differs"]) for row in rows] == [
        ("a", [1, 1, 1], False), ("section.b", [2, None, 2], True),
    ]  # fmt: skip


def test_runs_come_in_the_order_of_the_address_and_a_missing_one_is_said(as_ada: Client, ada: User) -> None:
    first, second = runs_of(ada, 1e-4, 2e-4)
    gone = "00000000-0000-0000-0000-000000000000"
    page = as_ada.get(f"/runs/compare/?run={second.pk}&run={gone}&run=x&run={first.pk}").content.decode()
    found = re.findall(r'data-drop-run="([^"]+)"', page)
    assert found == [str(second.pk), str(first.pk)]
    assert f"There is no run {gone}" in page
    assert "is not the id of a run" in page


def test_there_is_no_cap_on_runs_and_the_queries_do_not_grow_with_them(
    as_ada: Client, ada: User, django_assert_max_num_queries: object
) -> None:
    runs = [seed.make_run(ada, f"run {index}", state="completed", steps=0) for index in range(40)]
    with django_assert_max_num_queries(8):  # type: ignore[operator]
        page = as_ada.get(f"/runs/compare/?{query(runs)}").content.decode()
    assert page.count("data-drop-run=") == 40


def test_grouping_needs_a_setting_that_differs(as_ada: Client, ada: User) -> None:
    runs = runs_of(ada, 1e-4, 2e-4)
    page = as_ada.get(f"/runs/compare/?{query(runs)}&group=training.learning_rate").content.decode()
    assert "training.learning_rate = 0.0001" in page
    refused = as_ada.get(f"/runs/compare/?{query(runs)}&group=rollout.top_p").content.decode()
    assert (
        "can&#x27;t be grouped by &#x27;rollout.top_p&#x27;; settings that differ are training.learning_rate."
        in refused
    )


def test_the_list_sends_chosen_runs_to_the_comparison(as_ada: Client, ada: User) -> None:
    runs = runs_of(ada, 1e-4, 2e-4)
    answer = as_ada.post("/runs/bulk/", {"action": "compare", "run": [str(run.pk) for run in runs]})
    assert answer.status_code == 302
    address = urlsplit(answer.headers["Location"])
    assert address.path == "/runs/compare/"
    assert parse_qs(address.query) == {"run": [str(run.pk) for run in runs]}


def test_what_some_run_measures_is_drawn_for_all(as_ada: Client, ada: User) -> None:
    plain = seed.make_run(ada, "plain", steps=1)
    spec = sample_spec()
    more = spec.rewards[0].model_copy(update={"name": "soft_overlong"})
    spec = spec.model_copy(update={
        "rewards": [*spec.rewards, more], "evaluation": spec.evaluation.model_copy(update={"every_steps": 5})
    })  # fmt: skip
    page = as_ada.get(f"/runs/compare/?{query([plain])}").content.decode()
    assert "eval/reward" not in page
    other = seed.make_run(ada, "other", spec=spec, steps=1)
    page = as_ada.get(f"/runs/compare/?{query([plain, other])}").content.decode()
    drawn = re.findall(r'class="chart" data-metric="([^"]+)"', page)
    functions = [f"rewards/{spec.rewards[0].name}", "rewards/soft_overlong"]
    assert drawn[:5] == ["reward", "eval/reward", *functions, "reward_std"]


def test_every_point_of_a_chart_of_several_runs_is_one_file(as_ada: Client, ada: User) -> None:
    first, second = runs_of(ada, 1e-4, 2e-4)
    answer = as_ada.get(f"/runs/compare/export/?{query([second, first])}&metric=reward&metric=nothing")
    rows = list(csv.DictReader(b"".join(answer).decode().splitlines()))  # type: ignore[arg-type]
    assert [(row["run"], row["name"], row["step"]) for row in rows] == [
        (str(run.pk), run.name, str(step)) for run in (second, first) for step in (1, 2, 3)
    ]
    alone = as_ada.get(f"/api/runs/{second.pk}/metrics/export?metric=reward")
    own = list(csv.DictReader(b"".join(alone).decode().splitlines()))  # type: ignore[arg-type]
    assert [row["value"] for row in rows[:3]] == [row["value"] for row in own]
    for wrong in ("", query([first]), f"{query([first])}&metric=nothing"):
        assert as_ada.get(f"/runs/compare/export/?{wrong}").status_code == 404


def test_names_of_runs_are_shown_as_text(as_ada: Client, ada: User) -> None:
    evil = '"><script>alert(1)</script>'
    run = seed.make_run(ada, evil, steps=2)
    assert "<script>alert(1)" not in as_ada.get(f"/runs/compare/?run={run.pk}").content.decode()
