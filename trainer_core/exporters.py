"""Exporters: the reporting callbacks of transformers (TensorBoard, wandb, trackio, MLflow), kept from harming the run.

Each has a thread of its own. What it raises ends it and nothing else; a tracking server that does not answer only fills its
queue, which is bounded. They export values; checkpoints are the studio's to give.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl
from transformers.integrations import get_reporting_integration_callbacks

from trainer_core.spec import ExporterSpec

WAITING = 1000
"""Logs that may wait for an exporter; more are left out."""
STALLED_S = 10.0
"""At the end of training an exporter may send the rest, as long as it has not stood still for so long, ..."""
END_S = 120.0
"""... and no longer than this in all."""


def environment(wanted: ExporterSpec, run_dir: Path) -> dict[str, str]:
    """Variables by which libraries of exporters take their settings: what the host sets, and what the run adds to it."""
    defaults = {
        "TENSORBOARD_LOGGING_DIR": str(run_dir / "tensorboard"),
        "WANDB_PROJECT": wanted.project,
        "WANDB_DIR": str(run_dir),
        "WANDB_RUN_ID": run_dir.name,  # attempts of a run go on in one run there
        "WANDB_RESUME": "allow",
        "MLFLOW_EXPERIMENT_NAME": wanted.project,
        "MLFLOW_TRACKING_URI": f"sqlite:///{run_dir / 'mlflow.db'}",
    }
    chosen = {"MLFLOW_TRACKING_URI": wanted.mlflow_url} if wanted.mlflow_url else {}
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | chosen


class Exporters(TrainerCallback):
    """Hands training's events on to one exporter for each of `targets`, names that `report_to` knows.

    `event` writes to the run's page. Raises ValueError on a name that transformers does not know.
    """

    def __init__(self, targets: list[str], event: Callable[..., None]) -> None:
        kinds = get_reporting_integration_callbacks(targets)
        self._all = [_Exporter(name, kind, event) for name, kind in zip(targets, kinds, strict=True)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if state.is_world_process_zero:
            for exporter in self._all:
                exporter.start()
                exporter.put("on_train_begin", args, state, context)

    def on_log(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        for exporter in self._all:
            exporter.put("on_log", args, state, context)

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        deadline = time.monotonic() + END_S
        for exporter in self._all:
            exporter.put("on_train_end", args, state, context)
        for exporter in self._all:
            exporter.end(deadline)


class _Exporter:
    """One reporting callback, made by `make` on the thread that calls it. Methods are for the trainer's thread."""

    def __init__(self, name: str, make: Callable[[], TrainerCallback], event: Callable[..., None]) -> None:
        self._name, self._make, self._event = name, make, event
        self._queue: queue.Queue[tuple[str, Any, Any, dict[str, Any]] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name=f"exporter-{name}", daemon=True)
        self._failure: BaseException | None = None
        self._told = False
        self._left_out = 0
        self._done = 0

    def start(self) -> None:
        self._thread.start()

    def end(self, deadline: float) -> None:
        """Wait until what is queued was exported, while that advances and at most until `deadline`; say what was not."""
        done, stalled_at, asked = self._done, time.monotonic() + STALLED_S, False
        while self._thread.is_alive() and time.monotonic() < min(deadline, stalled_at):
            if not asked:
                with contextlib.suppress(queue.Full):
                    self._queue.put_nowait(None)
                    asked = True
            self._thread.join(0.1)
            if self._done != done:
                done, stalled_at = self._done, time.monotonic() + STALLED_S
        self._tell()
        if self._thread.is_alive():
            self._warn("did not finish; its last values may be missing there.")
        elif self._left_out:
            self._warn(f"was too slow: {self._left_out} logs are missing there.")

    def put(self, moment: str, args: Any, state: Any, context: Mapping[str, Any]) -> None:
        """Queue one call; never waits."""
        self._tell()
        if not self._thread.is_alive():
            return
        kept = {name: context[name] for name in ("model", "processing_class", "logs") if name in context}
        if "logs" in kept:
            kept["logs"] = dict(kept["logs"])
        try:
            self._queue.put_nowait((moment, args, copy.copy(state), kept))
        except queue.Full:
            self._left_out += 1

    def _tell(self) -> None:
        """Say once that the exporter failed."""
        if self._failure is None or self._told:
            return
        self._told = True
        lines = str(self._failure).strip().splitlines()
        reason = f"{type(self._failure).__name__}{f': {lines[0]}' if lines else ''}"
        self._warn(f"failed and gets no more values; training goes on. {reason}")

    def _warn(self, what: str) -> None:
        self._event("warning", "exporter", f"The exporter {self._name} {what}", target=self._name)

    def _run(self) -> None:
        try:
            callback = self._make()
            while (call := self._queue.get()) is not None:
                moment, args, state, context = call
                getattr(callback, moment)(args, state, TrainerControl(), **context)
                self._done += 1
        # whatever another library raises, an exit included, is told and ends this exporter only
        except BaseException as error:  # noqa: BLE001
            self._failure = error
