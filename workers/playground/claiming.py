"""Which queued playground servers start on this host: on what queued runs leave free, with all devices or none."""

from __future__ import annotations

import logging
from datetime import timedelta

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now
from django.utils import timezone
from pydantic import ValidationError

from webapp.hosts.models import Host
from webapp.playground.models import PlaygroundServer
from webapp.playground.services import change, held_by
from webapp.runs.models import State
from workers import leases
from workers.claiming import first_in_queue, free_devices, launch_supervisor

logger = logging.getLogger(__name__)
SUPERVISOR_MODULE = "workers.playground.supervisor"


def claim_for(host_name: str) -> list[PlaygroundServer]:
    """Claim what this host can serve now, start a supervisor for each, and say what the others wait for."""
    queued = PlaygroundServer.objects.filter(host__name=host_name, state=State.QUEUED).select_related("run", "host")
    claimed = [server for server in queued.order_by("created_at") if claim(server)]
    for server in claimed:
        start_supervisor(server)
    return claimed


def claim(server: PlaygroundServer) -> bool:
    """Take devices for a queued server, in one transaction with its state; else its reason says what it waits for."""
    try:
        with transaction.atomic():
            host = Host.objects.select_for_update().get(pk=server.host_id)
            reason = _claim(server, host)
    except IntegrityError:
        logger.info("Somebody else was faster; looking again at the next beat")
        return False
    if reason:
        waiting = PlaygroundServer.objects.filter(pk=server.pk, state=State.QUEUED)
        waiting.exclude(reason=reason).update(reason=reason)
    return not reason


def _claim(server: PlaygroundServer, host: Host) -> str:
    """Empty when it was claimed, or has ended; otherwise why not."""
    if server.last_used_at is not None and timezone.now() - server.last_used_at > timedelta(
        seconds=settings.PLAYGROUND_IDLE_S
    ):
        change(server, (State.QUEUED,), State.STOPPED, "It waited, and nobody looked at its page any more.")
        return "Ended."
    if host.drained:
        return f"Waits: {host.name} takes nothing new (drained)."
    if run := first_in_queue(host):
        return f"Waits behind run {run.name}, which is in the queue for devices of {host.name}."
    try:
        spec = server.run.run_spec()
    except ValidationError as error:
        change(
            server,
            (State.QUEUED,),
            State.FAILED,
            f"The run's settings are not valid any more: {error.errors()[0]['msg']}.",
        )
        return "Ended."
    present, free = free_devices(host)
    placement = leases.fit_server(spec, free)
    if placement is None:
        holders = held_by(present)
        return f"Waits for a device of {host.name}" + (
            f", held by {holders}." if holders else "; its worker's log says why."
        )
    fields = {"started_at": timezone.now(), "heartbeat_at": Now()}
    if not change(server, (State.QUEUED,), State.STARTING, f"Starts on {host.name}.", **fields):
        return "Ended."
    leases.take(server, placement)
    return ""


def start_supervisor(server: PlaygroundServer) -> None:
    launch_supervisor(server, SUPERVISOR_MODULE, "--server")
