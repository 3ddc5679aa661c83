"""Ends what dead supervisors of playground servers left behind, as workers/reaper.py does for runs."""

from __future__ import annotations

from functools import partial

from django.db.models.functions import Now

from webapp.playground.models import PlaygroundServer
from webapp.playground.services import change
from webapp.runs.models import ACTIVE, ENDED, State, server_log
from workers import failures, reaper
from workers.ending import Outcome
from workers.playground.claiming import start_supervisor
from workers.playground.ending import conclude

KILLED = "The supervisor of this server was killed, so the server was ended as well; start it again."


def reap_host(host_name: str) -> list[PlaygroundServer]:
    """Look after the playground servers of this host; returns those whose end it wrote."""
    of_host = PlaygroundServer.objects.filter(host__name=host_name).select_related("run", "host")
    reaped = []
    for server in of_host.filter(state__in=ACTIVE):
        outcome = None
        if server.supervisor_pid is None:
            outcome = reaper.without_supervisor(server, partial(start_supervisor, server))
        elif not reaper.supervised(server):
            log = failures.last_lines(failures.tail(server.folder / server_log(0)))
            outcome = Outcome(State.FAILED, KILLED, log)
        if outcome is not None and conclude(server, outcome, reaper.end_processes(server)):
            reaped.append(server)
    for server in of_host.filter(state__in=ENDED, leases__isnull=False).distinct():
        if not reaper.supervised(server):
            conclude(server, None, reaper.end_processes(server))
    return reaped


def reap_silent(own_host: str) -> None:
    """Servers of hosts that stopped reporting count as failed. Their devices stay held until that host has looked."""
    silent = PlaygroundServer.objects.filter(state__in=ACTIVE, heartbeat_at__lt=Now() - reaper.SILENT_FOR)
    for server in silent.exclude(host__name=own_host).select_related("run", "host"):
        change(
            server, ACTIVE, State.FAILED, f"Host {server.host.name} has not reported for {reaper.SILENT_FOR.seconds} s."
        )
