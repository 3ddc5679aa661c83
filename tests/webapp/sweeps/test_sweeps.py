"""Sweeps as people use them: a form with a preview, all or nothing, results, stop."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from django.test import Client

from tests.webapp import seed
from trainer_core.spool import encode_number
from webapp.accounts.models import User
from webapp.metrics.store import ship_spool
from webapp.runs import sweeps
from webapp.runs.models import Run, State
from webapp.sweeps.forms import read, values
from webapp.sweeps.models import Sweep
from webapp.sweeps.results import results_of, sorted_rows

pytestmark = pytest.mark.django_db


@pytest.fixture
def base(ada: User) -> Run:
    return seed.make_run(ada, "base", state="completed", steps=0)


def form(base: Run | None, *axes: dict[str, str], **fields: str) -> dict[str, str]:
    posted = {"base": str(base.pk) if base else "", "method": "grid", **fields}
    for index, axis in enumerate(axes):
        posted |= {f"axis.{index}.{name}": value for name, value in {"kind": "list", **axis}.items()}
    return posted


RATES = {"path": "training.learning_rate", "values": "1e-5, 3e-5, 1e-4"}
RANKS = {"path": "lora.r", "values": "8\n16"}


def test_a_range_is_even_in_a_grid_on_its_scale() -> None:
    assert sweeps.Range(0, 1, points=3).values() == [0, 0.5, 1]
    assert sweeps.Range(1e-6, 1e-4, log=True, points=3).values() == pytest.approx([1e-6, 1e-5, 1e-4])
    assert sweeps.Range(1, 4, points=10, whole=True).values() == [1, 2, 3, 4]  # each once
    drawn = [sweeps.Range(1e-6, 1e-2, log=True).draw(random.Random(seed)) for seed in range(400)]
    assert 1e-6 <= min(drawn) <= max(drawn) <= 1e-2
    assert 130 < sum(value < 1e-4 for value in drawn) < 270  # half of them, by the logarithm
    for wrong, text in (
        ((1, 1), "smaller to a larger"),
        ((0, 1, True), "begins above 0"),
        ((0, 1, False, 1), "2 to 200"),
    ):
        with pytest.raises(ValueError, match=text):
            sweeps.Range(*wrong)


def test_drawn_runs_differ_and_can_be_drawn_again() -> None:
    axes: dict[str, sweeps.Axis] = {"training.learning_rate": sweeps.Range(1e-6, 1e-4, log=True), "lora.r": [8, 16]}
    first, again, other = (sweeps.points(axes, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({place["training.learning_rate"] for place in first}) == 20
    assert {place["lora.r"] for place in first} == {8, 16}
    with pytest.raises(ValueError, match="draw by chance instead"):
        sweeps.points(axes, None, 0)


def test_every_setting_can_be_swept_rewards_too(base: Run) -> None:
    spec = base.run_spec()
    paths = sweeps.sweepable(spec)
    assert {"rewards.0.weight", "data.options", "model.path", "training.loss_type", "resources.trainer_gpus"} <= set(
        paths
    )
    assert not {"name", "tags"} & set(paths)
    made, problems = sweeps.specs(spec, [{"rewards.0.weight": 0.5}, {"data.options": {"max_digits": 2}}])
    assert problems == []
    assert (made[0].rewards[0].weight, made[1].data.options) == (0.5, {"max_digits": 2})


def test_typed_values_are_read_as_they_are_meant() -> None:
    assert values("training.learning_rate", " 1e-5, 3e-5 ,,1e-5") == ["1e-5", "3e-5"]
    assert values("data.prompt_suffix", "Think, then answer.\nJust answer.") == ["Think, then answer.", "Just answer."]
    assert values("server.kv_cache_gib", "none, 2") == [None, "2"]
    assert values("data.options", "{max_digits: 1}, {max_digits: 2}") == [{"max_digits": 1}, {"max_digits": 2}]
    with pytest.raises(ValueError, match="YAML objects"):
        values("data.options", "1, 2")


@pytest.mark.parametrize("axes, fields, sentence", [
    ([], {}, "Nothing varies yet"),
    ([{"path": "lora.r", "values": ""}], {}, "lora.r: has no values"),
    ([RANKS, RANKS], {}, "lora.r: is there twice"),
    ([{"path": "lora.r", "kind": "range", "low": "a", "high": "2"}], {}, "'from' needs a number; found 'a'"),
    ([{"path": "lora.r", "kind": "log", "low": "8", "high": "2"}], {}, "from a smaller to a larger"),
    ([RANKS], {"method": "random"}, "Say how many runs are to be drawn, 1 to 200"),
    ([RANKS], {"method": "random", "count": "900"}, "less than or equal to 200"),
    ([{"path": "", "values": "1"}], {}, None),
])  # fmt: skip
def test_what_can_not_be_understood_is_said(
    axes: list[dict[str, str]], fields: dict[str, str], sentence: str | None
) -> None:
    plan, problems = read(form(None, *axes, **fields))
    assert plan is None or sentence is None
    if sentence:
        assert sentence in problems[0].message


def test_the_preview_shows_the_combinations_or_what_is_wrong(as_ada: Client, base: Run) -> None:
    page = as_ada.post("/sweeps/preview/", form(base, RATES, RANKS)).content.decode()
    assert "6 runs" in page
    assert page.count("<tr>") == 7
    page = as_ada.post("/sweeps/preview/", form(base, {"path": "lora.r", "values": "8, 0"})).content.decode()
    assert "r=0: " in page
    assert "runs" not in page
    page = as_ada.post("/sweeps/preview/", form(base, {"path": "lora.rank", "values": "8"})).content.decode()
    assert "lora.rank: There is no such setting to sweep" in page
    assert "Choose the run" in as_ada.post("/sweeps/preview/", form(None, RANKS)).content.decode()
    assert Run.objects.count() == 1


def test_a_sweep_is_made_queued_shown_and_stopped(as_ada: Client, base: Run) -> None:
    answer = as_ada.post("/sweeps/new/", form(base, RATES, RANKS, name="rates and ranks"))
    sweep = Sweep.objects.get()
    assert answer.headers["Location"] == f"/sweeps/{sweep.pk}/"
    assert [trial.place for trial in sweep.trials.all()][:2] == [
        {"training.learning_rate": 1e-5, "lora.r": 8}, {"training.learning_rate": 1e-5, "lora.r": 16},
    ]  # fmt: skip
    runs = Run.objects.filter(trial__sweep=sweep)
    assert {run.state for run in runs} == {"queued"}
    assert {run.parent_id for run in runs} == {base.pk}
    page = as_ada.get(f"/sweeps/{sweep.pk}/").content.decode()
    assert page.count('data-testid="trial"') == 6
    first = sweep.trials.first()
    assert first is not None
    assert f"/sweeps/{sweep.pk}/" in as_ada.get(f"/runs/{first.run.pk}/").content.decode()
    assert "rates and ranks" in as_ada.get("/sweeps/").content.decode()
    Run.objects.filter(pk=first.run_id).update(state=State.RUNNING)
    as_ada.post(f"/sweeps/{sweep.pk}/stop/", {"save": "1"})
    first.run.refresh_from_db()
    assert first.run.desired == "stop_and_save"
    assert Run.objects.filter(trial__sweep=sweep, state="stopped").count() == 5


def test_nothing_is_made_when_one_run_could_not_start(as_ada: Client, base: Run) -> None:
    answer = as_ada.post(
        "/sweeps/new/", form(base, {"path": "data.source", "values": "reasoning_gym:products, /no/such.csv"})
    )
    assert answer.status_code == 422
    assert "/no/such.csv" in answer.content.decode()
    assert (Run.objects.count(), Sweep.objects.count()) == (1, 0)


def test_drafts_wait_for_a_person(as_ada: Client, base: Run) -> None:
    as_ada.post("/sweeps/new/", form(base, RANKS, action="draft"))
    assert set(Run.objects.exclude(pk=base.pk).values_list("state", flat=True)) == {"draft"}


def test_others_may_look_but_not_stop(as_ada: Client, as_grace: Client, base: Run) -> None:
    as_ada.post("/sweeps/new/", form(base, RANKS))
    path = f"/sweeps/{Sweep.objects.get().pk}/"
    page = as_grace.get(path)
    assert (page.status_code, "stop-sweep" in page.content.decode()) == (200, False)
    assert as_grace.post(f"{path}stop/").status_code == 403


def report(run: Run, rewards: list[float]) -> None:
    attempt = run.attempts.get()
    lines = b"".join(
        orjson.dumps({"v": 1, "kind": "metrics", "t": 1.0 + step, "step": step,
                      "values": {"reward": encode_number(value)}}) + b"\n"
        for step, value in enumerate(rewards, 1 + attempt.spool_offset)
    )  # fmt: skip
    attempt.spool_offset = ship_spool(attempt, attempt.spool_offset, lines)


def test_final_and_best_come_from_the_points(as_ada: Client, base: Run, django_assert_max_num_queries: Any) -> None:
    as_ada.post("/sweeps/new/", form(base, RATES))
    sweep = Sweep.objects.get()
    runs = [trial.run for trial in sweep.trials.all()]
    report(runs[0], [0.1, 0.9, 0.4])
    report(runs[1], [0.2, float("nan")])
    with django_assert_max_num_queries(8):
        results = results_of(sweep)
    assert [(row.final, row.best, row.leads) for row in results.rows] == [
        (0.4, 0.9, True), (None, 0.2, False), (None, None, False),
    ]  # fmt: skip
    report(runs[1], [0.95])
    assert results_of(sweep).rows[1].best == 0.95
    Sweep.objects.update(goal="min")
    assert [row.best for row in results_of(Sweep.objects.get()).rows] == [0.1, 0.2, None]
    rows = sorted_rows(results, "-best")
    assert [row.best for row in rows] == [0.9, 0.2, None]  # those without a value last, either way round
    assert [row.best for row in sorted_rows(results, "best")] == [0.2, 0.9, None]
    page = as_ada.get(f"/sweeps/{sweep.pk}/?sort=-training.learning_rate")
    assert page.content.decode().index("1e-05") > 0
    assert as_ada.get(f"/sweeps/{sweep.pk}/?fragment=1").status_code == 200


def test_a_sweep_outlives_its_base_and_its_runs(as_ada: Client, base: Run, ada: User) -> None:
    as_ada.post("/sweeps/new/", form(base, RANKS))
    Run.objects.all().delete()
    page = as_ada.get(f"/sweeps/{Sweep.objects.get().pk}/").content.decode()
    assert "its base is deleted" in page
    assert "All runs of this sweep are deleted" in page


def test_the_api_takes_ranges_and_gives_results(as_ada: Client, base: Run) -> None:
    body = {"axes": {"training.learning_rate": {"low": 1e-6, "high": 1e-4, "log": True}, "lora.r": [8, 16]}, "count": 3,
            "name": "drawn"}  # fmt: skip
    made = as_ada.post(f"/api/runs/{base.pk}/sweep", body, content_type="application/json")
    assert made.status_code == 201, made.content
    (row,) = as_ada.get("/api/sweeps").json()
    assert (row["name"], row["method"], row["states"]) == ("drawn", "random", {"draft": 3})
    found = as_ada.get(f"/api/sweeps/{row['id']}").json()
    assert [trial["run"] for trial in found["trials"]] == [run["id"] for run in made.json()]
    assert {run["sweep"] for run in made.json()} == {row["id"]}
    assert as_ada.post(f"/api/sweeps/{row['id']}/stop", {}, content_type="application/json").json() == {"stopped": 0}
    for wrong, text in (({"low": 1, "high": 0}, "smaller to a larger"), ({"low": 1, "high": 2}, "draw by chance")):
        answer = as_ada.post(f"/api/runs/{base.pk}/sweep", {"axes": {"lora.r": wrong}}, content_type="application/json")
        assert (answer.status_code, text in answer.json()["detail"]) == (422, True), answer.content
