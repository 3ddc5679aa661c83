"""How an attempt ends: what its state becomes and why, and giving back what it held. Supervisor and reaper share this."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, connection, transaction
from django.utils import timezone

from webapp.runs.lifecycle import change_state, record
from webapp.runs.models import ACTIVE, Attempt, AttemptServer, Desired, Event, Run, State
from workers import leases

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt. `log` are the last lines of the process that decided it."""

    state: State
    reason: str
    log: list[str] = field(default_factory=list)
    exit_code: int | None = None


def last_event(attempt: Attempt, *names: str) -> Event | None:
    """The newest event of these names that the trainer reported."""
    return attempt.events.filter(name__in=names).order_by("-id").first()


def trainer_outcome(
    attempt: Attempt, returncode: int, desired: str, explain: Callable[[], str], log: list[str]
) -> Outcome:
    """What the end of the trainer means. `explain` makes the sentence where the trainer itself left none."""
    failed, stopped = last_event(attempt, "failed"), last_event(attempt, "stopped")
    if returncode == 0 and not failed:
        if stopped or (desired != Desired.RUN and not last_event(attempt, "finished")):
            saved = "Saved a checkpoint and stopped." if desired == Desired.STOP_AND_SAVE else "Stopped."
            return Outcome(State.STOPPED, saved, exit_code=0)
        return Outcome(State.COMPLETED, "All steps are done.", exit_code=0)
    reason = failed.text if failed else explain()
    if desired == Desired.STOP:
        return Outcome(State.STOPPED, "Stopped.", log, returncode)
    return Outcome(State.FAILED, reason, log, returncode)


def conclude(attempt: Attempt, outcome: Outcome, keep: Mapping[str, list[int]]) -> bool:
    """Write the end of an attempt and release its ports and devices, in one transaction.

    `keep` are GPUs that can't be given back, and the pids on them: they stay leased, and the reaper looks again. The run
    itself changes only if this attempt is still its newest: a resume elsewhere is not overwritten. False when somebody
    else ended it before.
    """
    level = Event.Level.ERROR if outcome.state == State.FAILED else Event.Level.INFO
    with transaction.atomic():
        run = Run.objects.select_for_update().get(pk=attempt.run_id)
        current = run.current_attempt
        changed = False
        if current is not None and current.pk == attempt.pk:
            changed = change_state(
                run, (*ACTIVE, State.LOST), outcome.state, outcome.reason, attempt=attempt, level=level
            )
        else:
            Attempt.objects.filter(pk=attempt.pk, state__in=(*ACTIVE, State.LOST)).update(
                state=outcome.state, ended_at=timezone.now()
            )
        attempt.servers.update(state=AttemptServer.State.ENDED)
        if outcome.exit_code is not None:
            Attempt.objects.filter(pk=attempt.pk).update(exit_code=outcome.exit_code)
        if outcome.log:
            text = "Last lines of the log."
            record(run, "last_lines", text, attempt=attempt, level=level, log=outcome.log, exit_code=outcome.exit_code)
        if keep:
            record(run, "device_busy", not_given_back(keep), attempt=attempt, level=Event.Level.WARNING)
        leases.release(attempt, keep)
    return changed


def not_given_back(keep: Mapping[str, list[int]]) -> str:
    who = "; ".join(f"{uuid}: {', '.join(map(str, pids)) or 'unknown'}" for uuid, pids in keep.items())
    return f"Not given back, since processes are still on it ({who}); end them, and it is free in seconds."


def persist(action: Callable[[], T], deadline_s: float) -> T:
    """Do a database action, again while the database is busy or away. Raises its error after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    pause = 0.5
    while True:
        try:
            return action()
        except (DatabaseError, InterfaceError) as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("The database did not answer, trying again in %.1f s: %s", pause, error)
            connection.close()
        time.sleep(pause)
        pause = min(2 * pause, 10.0)
