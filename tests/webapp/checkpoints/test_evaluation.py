"""What was measured at a checkpoint's step goes with it, and the best one is marked, wherever checkpoints are shown."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.checkpoints.card import card_files
from webapp.metrics.store import ship_spool
from webapp.runs.models import Attempt, Run

pytestmark = pytest.mark.django_db


def line(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "kind": kind, "t": 1.7e9 + step, "step": step, **fields}


def event(name: str, step: int, **data: Any) -> dict[str, Any]:
    return line("event", step, level="info", name=name, text=f"{name} of step {step}.", data=data)


def evaluated(step: int, reward: float | str, best: bool) -> list[dict[str, Any]]:
    """What a trainer writes at a step that it evaluates and saves."""
    values = {"eval/reward": reward, "eval/pass@1": 0.5, "eval/pass@k": "nan", "eval/duration_s": 3.0}
    named = [event("best", step, metric="eval/reward", value=reward)] if best else []
    return [
        line("metrics", step, values={"loss": 0.0, "reward": step / 100}), line("metrics", step, values=values), *named,
        event("checkpoint", step, path="", size_bytes=1000, kind="adapter"),
    ]  # fmt: skip


def ship(attempt: Attempt, lines: list[dict[str, Any]]) -> None:
    ship_spool(attempt, attempt.spool_offset, b"".join(orjson.dumps(item) + b"\n" for item in lines))


LINES = [
    *evaluated(10, 0.4, best=True), *evaluated(20, 0.7, best=True), *evaluated(30, 0.6, best=False),
    event("checkpoint", 35, path="", size_bytes=1000, kind="adapter"),
]  # fmt: skip


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, steps=0)


@pytest.mark.parametrize("pieces", [1, len(LINES)])
def test_a_checkpoint_keeps_what_was_measured_at_its_step_however_the_lines_arrive(run: Run, pieces: int) -> None:
    attempt = run.attempts.get()
    size = -(-len(LINES) // pieces)
    for start in range(0, len(LINES), size):
        ship(attempt, LINES[start : start + size])
    found = {item.step: (item.evaluation, item.best) for item in run.checkpoints.all()}
    assert found == {
        10: ({"eval/reward": 0.4, "eval/pass@1": 0.5}, False),
        20: ({"eval/reward": 0.7, "eval/pass@1": 0.5}, True),
        30: ({"eval/reward": 0.6, "eval/pass@1": 0.5}, False),
        35: ({}, False),
    }


def test_a_piece_that_ends_between_an_evaluation_and_its_checkpoint_takes_nothing_from_the_next(run: Run) -> None:
    attempt = run.attempts.get()
    ship(attempt, LINES[:3])
    ship(attempt, LINES[3:])
    assert run.checkpoints.get(step=10).evaluation["eval/reward"] == 0.4


def test_an_evaluation_that_is_not_a_number_is_none(run: Run) -> None:
    ship(run.attempts.get(), evaluated(10, "nan", best=False))
    assert run.checkpoints.get().evaluation == {"eval/pass@1": 0.5}


def test_the_best_of_a_resumed_run_is_the_one_named_last(run: Run) -> None:
    ship(run.attempts.get(), LINES)
    again = Attempt.objects.create(run=run, number=2, state="running", resumed_from=run.checkpoints.get(step=10))
    ship(again, evaluated(20, 0.9, best=True))
    assert [(item.attempt.number, item.step) for item in run.checkpoints.filter(best=True)] == [(2, 20)]


def test_pages_api_and_card_show_it(as_ada: Client, run: Run) -> None:
    ship(run.attempts.get(), LINES)
    page = as_ada.get(f"/runs/{run.pk}/checkpoints/").content.decode()
    assert "evaluation: reward 0.700, pass@1 0.500" in page
    assert page.count('data-testid="best"') == 1
    overview = as_ada.get(f"/runs/{run.pk}/").content.decode()
    assert overview.count('class="tag best"') == 1
    assert '<td class="num">0.700</td>' in overview
    told = {item["step"]: item for item in as_ada.get(f"/api/runs/{run.pk}/checkpoints").json()}
    assert (told[20]["best"], told[20]["evaluation"]["eval/reward"], told[30]["best"]) == (True, 0.7, False)
    card = card_files(run.checkpoints.get(step=20))["README.md"]
    assert "| Evaluation at step 20 | reward 0.7, pass@1 0.5; the best of the run so far |" in card
    assert "Evaluation" not in card_files(run.checkpoints.get(step=35))["README.md"]


def test_a_run_without_evaluation_has_no_column_of_it(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, steps=20)
    assert ">Eval</th>" not in as_ada.get(f"/runs/{run.pk}/").content.decode()
