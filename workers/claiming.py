"""Who starts where: a host takes queued runs in order, with all their devices or none, and the rest are told why they wait."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now
from django.utils import timezone
from kombu.exceptions import OperationalError
from pydantic import ValidationError

from trainer_core.spec import RunSpec
from webapp.celery import app
from webapp.hosts.models import ALIVE_FOR, Device, Host
from webapp.hosts.offers import HOLDERS, gpus_are_up, takes_runs
from webapp.hosts.placement import Placement, gpu_of
from webapp.hosts.spreading import Share, shares
from webapp.playground.services import held_by
from webapp.runs.lifecycle import change_state
from webapp.runs.models import Attempt, Event, Run, State
from workers import devices, leases, processes
from workers.followers.choosing import fits, lock_hosts, other_hosts, waits_for_hosts

logger = logging.getLogger(__name__)
SUPERVISOR_MODULE = "workers.supervisor"
LOOK_AHEAD = 200
"""Queued runs looked at in one pass."""


def claim_for(host_name: str) -> list[Attempt]:
    """Claim what this host can run now, start a supervisor for each, and say why the other queued runs wait."""
    claimed = []
    while attempt := claim_next(host_name):
        start_supervisor(attempt)
        call_followers(attempt)
        claimed.append(attempt)
    explain_queue()
    return claimed


def claim_next(host_name: str) -> Attempt | None:
    """Take the first queued run that this host can serve: state and all leases in one transaction, or nothing.

    First come, first served: a run that fits this host but not its free devices holds back later ones, so that a large
    run is not starved by small ones. A run over several hosts gets devices of all of them in this transaction.
    """
    try:
        with transaction.atomic():
            host, others = lock_hosts(host_name)
            present, free = free_devices(host)
            if not takes_runs(host, present, gpus_are_up()):
                return None
            for run in _queue():
                attempt = run.current_attempt
                spec = _spec_or_fail(run, attempt)
                if spec is None or attempt is None:
                    continue
                if not fits(spec, host, present, others):
                    continue
                placement = leases.fit(spec, free)
                further = shares(spec.resources, present, [(o.host, o.free) for o in others])
                if placement is None or further is None:
                    return None
                return attempt if _take(run, attempt, host, placement, further) else None
            return None
    except IntegrityError:
        logger.info("Another worker was faster; looking again at the next beat")
        return None


def _take(run: Run, attempt: Attempt, host: Host, placement: Placement[Device], further: list[Share]) -> bool:
    now = timezone.now()
    slots = [*placement.slots, *(device for share in further for device in share.devices)]
    gpus = {gpu_of(slot.uuid) for slot in slots if slot.kind == Device.Kind.GPU}
    names = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}" if gpus else f"the CPU slot{'s' * (len(slots) > 1)}"
    reason = f"Starts on {' and '.join([host.name, *(share.host.name for share in further)])} with {names}."
    if not change_state(run, (State.QUEUED,), State.STARTING, reason, attempt=attempt):
        return False
    Run.objects.filter(pk=run.pk, started_at=None).update(started_at=now)
    Attempt.objects.filter(pk=attempt.pk).update(host=host, started_at=now, heartbeat_at=Now())
    leases.take(attempt, placement)
    for rank, share in enumerate(further, 1):
        follower = attempt.followers.create(host=share.host, rank=rank, started_at=now, heartbeat_at=Now())
        leases.take_share(follower, share.devices)
    attempt.refresh_from_db()
    return True


def _spec_or_fail(run: Run, attempt: Attempt | None) -> RunSpec | None:
    try:
        return run.run_spec()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"The stored spec is not valid any more: {field}: {first['msg']}; clone the run and correct it."
        change_state(run, (State.QUEUED,), State.FAILED, reason, attempt=attempt, level=Event.Level.ERROR)
        return None


def _queue() -> list[Run]:
    return list(Run.objects.filter(state=State.QUEUED).order_by("queued_at", "id")[:LOOK_AHEAD])


def free_devices(host: Host) -> tuple[list[Device], list[Device]]:
    """(present, free) devices; a GPU that a stranger computes on is not free, though nobody leased it.

    Those that hold another slot of the GPU are no strangers.
    """
    present = list(host.devices.filter(present=True).order_by("kind", "index").select_related("lease"))
    unleased = [device for device in present if not hasattr(device, "lease")]
    try:
        uuids = [device.uuid for device in unleased]
        strangers = devices.computing_besides(uuids, leases.holders_of(uuids))
    except devices.DriverFailed as error:
        logger.error("No GPU is given to a run, since the driver does not say whether they are free: %s", error)
        return present, []
    for uuid, pids in strangers.items():
        if pids:
            logger.warning("GPU %s is not leased, but processes %s compute on it; no run gets it", uuid, pids)
    return present, [device for device in unleased if not strangers.get(gpu_of(device.uuid))]


def explain_queue() -> None:
    """Write into each queued run what it waits for. The same text comes out on every host, so hosts do not disagree."""
    hosts = list(
        Host.objects.filter(last_seen_at__gt=timezone.now() - ALIVE_FOR).prefetch_related(
            *(f"devices__{name}" for name in HOLDERS)
        )
    )
    ahead: Run | None = None
    for run in _queue():
        try:
            spec = run.run_spec()
        except ValidationError:  # the next claim ends it with a sentence
            continue
        reason = _waits_for(spec, hosts, ahead)
        ahead = ahead or run
        Run.objects.filter(pk=run.pk, state=State.QUEUED).exclude(reason=reason).update(reason=reason)


def _waits_for(spec: RunSpec, hosts: list[Host], ahead: Run | None) -> str:
    open_hosts = [host for host in hosts if not host.drained]
    if not open_hosts:
        return f"Waits: {hosts[0].name} takes no new runs (drained)." if hosts else "Waits for a worker; none reports."
    if spec.resources.trainer_hosts > 1:
        return waits_for_hosts(spec, open_hosts, ahead)
    gpus = {
        host.name: [d for d in host.devices.all() if d.present and d.kind == Device.Kind.GPU] for host in open_hosts
    }
    if any(gpus.values()):
        needed = leases.gpus_needed(spec)
        free = {name: sum(not hasattr(device, "lease") for device in found) for name, found in gpus.items() if found}
        have = ", ".join(f"host {name} has {count} free of {len(gpus[name])}" for name, count in free.items())
        if any(gpu_of(device.uuid) != device.uuid for found in gpus.values() for device in found):
            have += " slots"
        if lent := [d for found in gpus.values() for d in found if hasattr(d, "lease") and d.lease.playground_id]:
            have += f"; {len(lent)} held by {held_by(lent)}"
        if ahead is not None and max(free.values()) >= needed:
            return f"Waits for its turn behind run {ahead.name}; {have}."
        return f"Waits for {needed} GPUs; {have}."
    slots = [device for host in open_hosts for device in host.devices.all() if device.present]
    held = [device for device in slots if hasattr(device, "lease")]
    if not slots:
        return f"Waits for a device; host {open_hosts[0].name} offers none, its worker's log says why."
    if len(held) < len(slots):
        return f"Waits for its turn behind run {ahead.name}." if ahead else "Waits for a worker."
    return f"Waits for the CPU slot, held by {held_by(held)}."


def first_in_queue(host: Host) -> Run | None:
    """The queued run that gets devices of this host next; None when none of the queue can run here."""
    present = list(host.devices.filter(present=True).order_by("kind", "index"))
    if not takes_runs(host, present, gpus_are_up()):
        return None
    others = other_hosts(host)
    for run in _queue():
        with suppress(ValidationError):  # the next claim ends such a run with a sentence
            if fits(run.run_spec(), host, present, others):
                return run
    return None


def call_followers(attempt: Attempt) -> None:
    """Have the further hosts of an attempt look now for what they start. A lost message costs seconds: beat asks too."""
    for follower in attempt.followers.select_related("host"):
        try:
            app.send_task("workers.claim", queue=follower.host.queue, expires=30, ignore_result=True)
        except OperationalError as error:
            logger.warning("Host %s was not told of %s: %s", follower.host, attempt, error)


def start_supervisor(attempt: Attempt) -> None:
    launch_supervisor(attempt, SUPERVISOR_MODULE, "--attempt")


def launch_supervisor(holder: leases.Holder, module: str, option: str, log: Path | None = None) -> None:
    """Start the holder's supervisor in its own session; it goes on when this worker ends.

    The supervisor enters itself into the database by compare-and-swap, so a second one started by mistake ends at once.
    """
    holder.folder.mkdir(parents=True, exist_ok=True)
    process = processes.start(
        [sys.executable, "-m", module, option, str(holder.pk)],
        env={**os.environ, processes.MARK: str(holder.pk), "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"},
        log=log or holder.folder / "supervisor.log",
        cwd=settings.BASE_DIR,
    )
    logger.info("Started supervisor %s of %s", process.pid, holder)
    threading.Thread(target=_collect, args=(process,), daemon=True, name=f"collect-{process.pid}").start()


def _collect(process: subprocess.Popen[bytes]) -> None:
    """Wait for a supervisor so that it does not stay as a zombie."""
    process.wait()
