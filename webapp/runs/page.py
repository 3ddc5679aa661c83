"""What the head of a run's pages shows: progress, latest values, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.utils import timezone

from webapp.accounts.models import User
from webapp.hosts.models import Device, Lease
from webapp.metrics.models import Series
from webapp.runs.logs import log_files, read_end
from webapp.runs.models import ENDED, Attempt, AttemptServer, Run, State
from webapp.runs.services import may_change

LOG_LINES = 12


@dataclass
class Progress:
    """`eta` is None before the first step, and once the run has ended."""

    step: int | None
    max_steps: int
    elapsed: timedelta | None
    eta: timedelta | None


@dataclass
class Head:
    """Everything the head needs; `can_*` say which buttons there are."""

    run: Run
    attempt: Attempt | None
    progress: Progress
    failure_lines: list[str] = field(default_factory=list)
    may_change: bool = False
    imported: bool = False

    @property
    def can_launch(self) -> bool:
        return self.may_change and self.run.state == State.DRAFT

    @property
    def can_stop(self) -> bool:
        return self.may_change and self.run.is_live

    @property
    def can_resume(self) -> bool:
        return self.may_change and self.run.state in ENDED and not self.imported

    @property
    def waiting(self) -> bool:
        """Live, but without a step yet: the reason says what is being waited for."""
        return self.run.is_live and self.progress.step is None


def head(run: Run, user: User) -> Head:
    attempt = run.current_attempt
    found = Head(run, attempt, _progress(run, attempt), may_change=may_change(user, run))
    found.imported = run.state in ENDED and run.imported
    if run.state in (State.FAILED, State.LOST):
        found.failure_lines = _failure_lines(run, attempt)
    return found


@dataclass(frozen=True)
class ServerLine:
    """A server of a live attempt and what it generates on, as "GPU 0, 1"."""

    server: AttemptServer
    devices: str


def servers(run: Run) -> list[ServerLine]:
    """The servers of a live run, by number; those of one that is over are gone."""
    attempt = run.current_attempt
    if attempt is None or not run.is_live:
        return []
    on: dict[int, list[str]] = {}
    for lease in attempt.leases.select_related("device").order_by("device__index"):
        if lease.device.kind == Device.Kind.GPU and lease.purpose != Lease.Purpose.TRAINER:
            on.setdefault(lease.replica or 0, []).append(str(lease.device.index))
    return [
        ServerLine(server, f"GPU {', '.join(on[server.number])}" if server.number in on else "CPU")
        for server in attempt.servers.all()
    ]


def _progress(run: Run, attempt: Attempt | None) -> Progress:
    summary: dict[str, Any] = run.summary
    max_steps = run.spec.get("training", {}).get("max_steps", 0)
    step = summary.get("step")
    elapsed = eta = None
    if run.started_at:
        elapsed = (run.ended_at or timezone.now()) - run.started_at
    if run.state == State.RUNNING and step is not None and attempt is not None:
        seconds = (
            Series.objects.filter(attempt=attempt, name="perf/step_s").values_list("last_value", flat=True).first()
        )
        if seconds:
            eta = timedelta(seconds=seconds * max(0, max_steps - step))
    return Progress(step, max_steps, elapsed, eta)


def _failure_lines(run: Run, attempt: Attempt | None) -> list[str]:
    """The log lines that were stored with the failure, or else the end of the attempt's first log."""
    if attempt is None:
        return []
    event = run.events.filter(attempt=attempt, name="last_lines").order_by("-id").first()
    if event is not None and event.data.get("log"):
        return [str(line) for line in event.data["log"]][-LOG_LINES:]
    for path in log_files(attempt):
        if lines := [line for line in read_end(path).text.splitlines() if line.strip()]:
            return lines[-LOG_LINES:]
    return []
