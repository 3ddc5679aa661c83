"""The trainer's end of an evaluation: ask the rollout worker for one, and wait for what it found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from trainer_core.intake import REPORT_EVERY_S, SampleIntake
from trainer_core.rollout.messages import EvaluationDone, EvaluationRequested

POLL_S = 0.1
NAMES = ("eval/reward", "eval/pass@1", "eval/pass@k")


class Worker(Protocol):
    """The part of the rollout worker that an evaluation uses."""

    def send(self, message: object) -> None: ...

    def check(self) -> None: ...


def evaluate(worker: Worker, intake: SampleIntake, step: int, event: Callable[..., None]) -> dict[str, float]:
    """Metrics of the servers' policy on the evaluation dataset, by their names in the metric table; NaN where unknown.

    Waits as long as the worker lives and its heartbeat is fresh (it raises otherwise), and no order to stop comes: each
    request and each scoring call in it has a deadline of its own.
    """
    worker.send(EvaluationRequested(step))
    started = reported = time.monotonic()
    while (done := _take(intake, step)) is None:
        intake.poll()
        worker.check()
        if intake.order is not None:
            return dict.fromkeys(NAMES, math.nan)
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S:
            reported = now
            print(f"waiting for the evaluation of step {step}, {now - started:.0f} s", flush=True)
        time.sleep(POLL_S)
    values = done.values or dict.fromkeys(NAMES, math.nan)
    if done.values:
        found = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in values.items())
        event("info", "evaluated", f"Evaluation at step {step}: {found}.", seconds=done.seconds, rollouts=done.rollouts)
    if done.unscored:
        text = f"{done.unscored} of {done.rollouts} evaluation rollouts could not be generated or scored; they are left out."
        event("warning", "evaluation_incomplete", text)
    return {**values, "eval/duration_s": done.seconds}


def _take(intake: SampleIntake, step: int) -> EvaluationDone | None:
    done = intake.evaluation
    return done if done is not None and done.step == step else None
