"""The trainer's end of the sample queue: waiting, dropping what is stale, and keeping account of prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer_core.rollout.messages import (
    EvaluationDone,
    GroupConsumed,
    GroupDropped,
    ServerBack,
    ServerLost,
    WorkerEvent,
    WorkerMetrics,
)
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.types import RolloutSample

POLL_S = 1.0
REPORT_EVERY_S = 30.0
CONTROL_FILE = "control"
Order = Literal["stop", "stop_and_save"]


class Worker(Protocol):
    """The part of the rollout worker that the intake uses."""

    def get(self, timeout: float) -> RolloutSample | None: ...

    def receive(self) -> list[object]: ...

    def send(self, message: object) -> None: ...

    def queue_size(self) -> int: ...


@dataclass
class _Group:
    """Progress of a group: samples pulled from the queue, of these to be trained, and finished (trained or dropped)."""

    epoch: int
    complete: bool = False
    pulled: int = 0
    kept: int = 0
    finished: int = 0


class SampleIntake:
    """Pulls samples one at a time and remembers which prompts are done.

    A group's admission slot is given back when its last sample is pulled: from then on nothing can make it staler. Its
    prompt counts as done when the last sample was trained or dropped.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        state: RolloutState,
        max_staleness: int,
        prompts_wanted: float,
        control_path: Path,
        add: Callable[[str, Any], None],
        event: Callable[..., None],
        server_back: Callable[[str], None],
    ) -> None:
        self.worker = worker
        self.state = state
        self.order: Order | None = None
        self.evaluation: EvaluationDone | None = None
        self._max_staleness = max_staleness
        self._prompts_wanted = prompts_wanted
        self._control_path = control_path
        self._add = add
        self._event = event
        self._server_back = server_back
        self._groups: dict[str, _Group] = {}
        known = state.num_rows and math.isfinite(prompts_wanted)
        self._epochs = math.ceil(prompts_wanted / state.num_rows) if known else math.inf

    @property
    def exhausted(self) -> bool:
        """Whether every prompt that was wanted is done, or will be with the samples already pulled.

        Generation runs ahead into later epochs; what it dropped or queued of them does not count.
        """
        complete = sum(group.epoch < self._epochs for group in self._groups.values() if group.complete)
        return self.state.prompts_done(self._epochs) + complete >= self._prompts_wanted

    def poll(self) -> None:
        """Look at the control file and at the worker's messages. Raises ValueError on an unknown order."""
        if self.order is None and self._control_path.is_file():
            word = self._control_path.read_text().strip()
            if word in ("stop", "stop_and_save"):
                self.order = word  # type: ignore[assignment]
            elif word:
                raise ValueError(f"the control file says {word!r}; allowed are stop and stop_and_save")
        for message in self.worker.receive():
            self._handle(message)

    def take_late(self) -> None:
        """What a stopped worker had still to tell: its last metrics and events."""
        for message in self.worker.receive():
            if isinstance(message, WorkerMetrics | WorkerEvent):
                self._handle(message)

    def next(self) -> RolloutSample | None:
        """The next sample that is fresh enough; None when an order came or all prompts are done.

        Waits as long as the worker lives and its heartbeat is fresh; the worker raises otherwise.
        """
        started = time.monotonic()
        reported = started
        while True:
            self.poll()
            if self.order is not None or self.exhausted:
                return None
            self._add("sample/rollout_queue_size", self.worker.queue_size())
            before = time.monotonic()
            sample = self.worker.get(timeout=POLL_S)
            now = time.monotonic()
            self._add("perf/rollout_wait_s", now - before)
            if sample is not None:
                if (accepted := self._accept(sample)) is not None:
                    return accepted
            elif now - reported >= REPORT_EVERY_S:
                reported = now
                print(f"waiting for samples, {now - started:.0f} s", flush=True)

    def finish(self, sample: RolloutSample) -> None:
        """The sample was trained or dropped; with the last one of its group the prompt is done."""
        group = self._groups[sample.group_id]
        group.finished += 1
        if group.finished == sample.group_size:
            del self._groups[sample.group_id]
            self.state.mark(sample.epoch, sample.row_index)

    def _accept(self, sample: RolloutSample) -> RolloutSample | None:
        group = self._groups.setdefault(sample.group_id, _Group(sample.epoch))
        staleness = self.state.weight_version - sample.weight_version
        fresh = staleness <= self._max_staleness
        group.pulled += 1
        group.kept += fresh
        if group.pulled == sample.group_size:
            group.complete = True
            self.worker.send(GroupConsumed(sample.group_id, group.kept))
        self._add("sample/dropped_stale_total", float(not fresh))
        if not fresh:
            self.finish(sample)
            return None
        self._add("sample/time_in_queue_s", max(0.0, time.time() - sample.queued_at))
        self._add("sample/staleness_mean", staleness)
        self._add("sample/staleness_max", staleness)
        return sample

    def _handle(self, message: object) -> None:
        if isinstance(message, WorkerMetrics):
            for name, values in message.values.items():
                for value in values:
                    self._add(name, value)
        elif isinstance(message, GroupDropped):
            self.state.mark(message.epoch, message.row_index)
        elif isinstance(message, WorkerEvent):
            self._event(message.level, message.name, message.text, **message.data)
        elif isinstance(message, ServerLost):
            text = f"The server at {message.url} stopped answering; what it was generating begins again."
            self._event("warning", "server_lost", text, url=message.url)
        elif isinstance(message, ServerBack):
            self._server_back(message.url)
        elif isinstance(message, EvaluationDone):
            self.evaluation = message
        else:
            raise TypeError(f"the rollout worker sent a {type(message).__name__}, which the trainer does not know")
