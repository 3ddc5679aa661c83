"""Keeps the database truthful when a supervisor, a worker or a whole host dies.

On its own host a dead supervisor is seen by its pid and creation time; its processes are swept, what they reported is
shipped, and its devices are freed. A host that is silent is judged by the database's clock: its runs become lost, and
keep their devices, since nobody can see whether processes still use them. A supervisor that lives takes its run back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from webapp.hosts.models import Host
from webapp.runs.lifecycle import change_state
from webapp.runs.models import ACTIVE, ENDED, Attempt, Event, State
from workers import failures, leases, processes
from workers.claiming import start_supervisor
from workers.ending import Outcome, conclude, last_event
from workers.shipping import is_behind, ship_all

logger = logging.getLogger(__name__)

SILENT_FOR = timedelta(seconds=60)
"""An attempt whose heartbeat is older is lost, unless this host itself can see its supervisor."""
SUPERVISOR_STARTS_IN_S = 20.0
"""A claimed attempt without a supervisor after this time gets one again..."""
SUPERVISOR_GIVEN_UP_S = 180.0
"""...and fails after this."""
SHIPS_LATE_FOR = timedelta(hours=24)


def reap_host(host_name: str) -> list[Attempt]:
    """Look after the attempts of this host; returns those whose end it wrote."""
    host = Host.objects.filter(name=host_name).first()
    if host is None:
        return []
    reaped = []
    for attempt in _of(host, state__in=ACTIVE):
        if attempt.supervisor_pid is None:
            if outcome := without_supervisor(attempt, partial(start_supervisor, attempt)):
                _bury(attempt, outcome)
        elif not supervised(attempt) and _bury(attempt):
            reaped.append(attempt)
    for attempt in _of(host, state__in=ENDED, leases__isnull=False, leases__follower=None):
        if not supervised(attempt):
            _bury(attempt)
    for attempt in _of(host, state__in=ENDED, ended_at__gt=timezone.now() - SHIPS_LATE_FOR):
        if is_behind(attempt) and not supervised(attempt):
            ship_all(attempt)
    return reaped


def reap_silent(own_host: str) -> list[Attempt]:
    """Take attempts of hosts that stopped reporting for lost. Nothing is freed, and a heartbeat brings them back."""
    expired = Attempt.objects.filter(
        Q(heartbeat_at=None) | Q(heartbeat_at__lt=Now() - SILENT_FOR), state__in=ACTIVE, host__isnull=False
    ).exclude(host__name=own_host)
    lost = []
    for attempt in expired.select_related("run", "host"):
        assert attempt.host is not None
        reason = (
            f"Host {attempt.host.name} has not reported for {SILENT_FOR.seconds} s. The run goes on if it comes back; if it "
            "does not, resume the run elsewhere."
        )
        if change_state(attempt.run, ACTIVE, State.LOST, reason, attempt=attempt, level=Event.Level.WARNING):
            lost.append(attempt)
    return lost


def _of(host: Host, **conditions: object) -> list[Attempt]:
    return list(Attempt.objects.filter(host=host, **conditions).select_related("run", "host").distinct())


def supervised(holder: leases.Holder) -> bool:
    return processes.is_alive(holder.supervisor_pid, holder.supervisor_create_time, str(holder.pk))


def without_supervisor(holder: leases.Holder, again: Callable[[], object]) -> Outcome | None:
    """Its worker died between claim and start, or the supervisor does not come up: once more, then give up."""
    assert holder.started_at is not None
    age = (timezone.now() - holder.started_at).total_seconds()
    if age > SUPERVISOR_GIVEN_UP_S:
        log = failures.last_lines(failures.tail(holder.folder / "supervisor.log"))
        return Outcome(State.FAILED, "The supervisor did not start; supervisor.log says why.", log)
    if age > SUPERVISOR_STARTS_IN_S and not processes.marked(str(holder.pk)):
        again()
    return None


def _bury(attempt: Attempt, outcome: Outcome | None = None) -> bool:
    """End what a dead supervisor left, ship its lines, free what it held. True when this ended the run."""
    keep = end_processes(attempt)
    ship_all(attempt)
    if attempt.state in ENDED:  # only devices are left to give back
        leases.release(attempt, keep)
        return False
    return conclude(attempt, outcome or _reported(attempt), keep)


def end_processes(holder: leases.Holder) -> dict[str, list[int]]:
    """Kill what a dead supervisor left, and remove its shared memory. Returns devices that stay taken, with the pids."""
    groups, blocks = processes.read_record(holder.folder)
    born_before = (holder.heartbeat_at.timestamp() if holder.heartbeat_at else time.time()) + 60
    blocks |= processes.shared_memory(processes.belonging(str(holder.pk), groups, born_before))
    killed, alive = processes.sweep(str(holder.pk), groups, born_before)
    if killed or alive:
        logger.warning("The supervisor of %s is dead; killed %s, still alive %s", holder, killed, alive or "none")
    processes.remove_shared_memory(blocks)
    return {uuid: alive for uuid in leases.held_uuids(holder)} if alive else leases.busy_gpus(holder)


def _reported(attempt: Attempt) -> Outcome:
    """What the trainer had reported last, or that the run was cut off."""
    event = last_event(attempt, "finished", "stopped", "failed")
    if event is None:
        reason = (
            "The run's supervisor was killed, so its processes were ended; resume to go on from the last checkpoint."
        )
        log = failures.last_lines(failures.tail(attempt.folder / "trainer.log"))
        return Outcome(State.FAILED, reason, log)
    state = {"finished": State.COMPLETED, "stopped": State.STOPPED, "failed": State.FAILED}[event.name]
    return Outcome(state, event.text)
