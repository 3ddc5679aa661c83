"""The trainer waits for an evaluation as long as there is somebody to wait for."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from trainer_core.evaluation import evaluate
from trainer_core.intake import SampleIntake
from trainer_core.rollout.messages import EvaluationDone, EvaluationRequested
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.worker import RolloutWorkerError


class Worker:
    """Answers an evaluation with `answer` after a moment, or is dead."""

    def __init__(self, answer: EvaluationDone | None = None, dead: bool = False) -> None:
        self.sent: list[Any] = []
        self._messages: list[Any] = []
        self._answer, self._dead = answer, dead

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if self._answer is not None:
            threading.Timer(0.3, lambda: self._messages.append(self._answer)).start()

    def receive(self) -> list[Any]:
        messages, self._messages = self._messages, []
        return messages

    def check(self) -> None:
        if self._dead:
            raise RolloutWorkerError("the rollout worker (pid 1) was ended by SIGKILL")

    def get(self, timeout: float) -> None: ...

    def queue_size(self) -> int:
        return 0


def ask(worker: Worker, tmp_path: Path) -> tuple[dict[str, float], list[tuple[Any, ...]]]:
    events: list[tuple[Any, ...]] = []
    intake = SampleIntake(
        worker, state=RolloutState(), max_staleness=0, prompts_wanted=1, control_path=tmp_path / "control",
        add=lambda *_: None, event=lambda *_, **__: None, server_back=lambda _: None,
    )  # fmt: skip
    found = evaluate(worker, intake, 7, lambda level, name, text, **data: events.append((level, name, text)))
    return found, events


def test_the_values_come_back_and_are_told(tmp_path: Path) -> None:
    values = {"eval/reward": 0.5, "eval/pass@1": 0.25, "eval/pass@k": 0.75}
    worker = Worker(EvaluationDone(7, values, rollouts=8, unscored=1, seconds=2.5))
    found, events = ask(worker, tmp_path)
    assert worker.sent == [EvaluationRequested(7)]
    assert found == {**values, "eval/duration_s": 2.5}
    assert events[0] == ("info", "evaluated", "Evaluation at step 7: reward 0.500, pass@1 0.250, pass@k 0.750.")
    assert events[1][:2] == ("warning", "evaluation_incomplete")
    assert events[1][2].startswith("1 of 8 evaluation rollouts could not be generated or scored")


def test_nothing_scored_is_not_a_number(tmp_path: Path) -> None:
    found, events = ask(Worker(EvaluationDone(7, {}, rollouts=8, unscored=8, seconds=1.0)), tmp_path)
    assert math.isnan(found["eval/reward"])
    assert [event[1] for event in events] == ["evaluation_incomplete"]


def test_a_dead_worker_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(RolloutWorkerError, match="ended by SIGKILL"):
        ask(Worker(dead=True), tmp_path)


def test_an_order_to_stop_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("stop")
    found, events = ask(Worker(), tmp_path)
    assert all(math.isnan(value) for value in found.values())
    assert events == []
