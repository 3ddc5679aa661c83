"""Celery tasks: short, idempotent, and nothing trains in them. A queue for each host, and the default one for any.

    celery -A workers.tasks worker --pool threads -c 4 -Q celery,host.<name>
    celery -A workers.tasks beat

The thread pool leaves no children behind when a worker is killed. A supervisor is a process of its own and outlives it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

import django

from webapp.celery import app

django.setup()
# The checks import every page of the web app, which a worker never serves.
os.environ.setdefault("CELERY_SKIP_CHECKS", "true")

from celery.signals import worker_ready  # noqa: E402
from django.db import DatabaseError, InterfaceError, connection  # noqa: E402
from django.utils import timezone  # noqa: E402
from kombu.exceptions import OperationalError  # noqa: E402

from webapp.hosts.models import ALIVE_FOR, Host  # noqa: E402
from webapp.metrics import retention  # noqa: E402
from workers import claiming, devices, exporting, reaper, watching  # noqa: E402
from workers.followers import reaping as follower_reaping  # noqa: E402
from workers.followers import starting  # noqa: E402
from workers.playground import claiming as playground_claiming  # noqa: E402
from workers.playground import reaping  # noqa: E402

__all__ = ["app"]
logger = logging.getLogger(__name__)
REPORT_EVERY_S = 5.0
_one_at_a_time = {name: threading.Lock() for name in ("claim", "reap", "watch", "drop points")}


def _exclusively(name: str, action: Callable[[], object]) -> None:
    """Skip when the same work is already going on in this process; beat sends it again in seconds."""
    lock = _one_at_a_time[name]
    if lock.acquire(blocking=False):
        try:
            action()
        finally:
            lock.release()


def _ask_hosts(task: str) -> None:
    """Send a task to every live host's own queue. It expires, so that a host that died does not find a heap of old ones."""
    alive = Host.objects.filter(last_seen_at__gt=timezone.now() - ALIVE_FOR)
    for host in alive:
        app.send_task(task, queue=host.queue, expires=30)


@app.task(name="workers.claim_queued")
def claim_queued() -> None:
    """There is something to claim: every live host looks, and the database decides who gets it."""
    _ask_hosts("workers.claim")


@app.task(name="workers.look_after_hosts")
def look_after_hosts() -> None:
    """Judge the hosts that are silent, and ask the others to reap."""
    reaper.reap_silent(devices.host_name())
    reaping.reap_silent(devices.host_name())
    _ask_hosts("workers.reap")


@app.task(name="workers.watch_runs")
def watch_runs() -> None:
    """Look for alerts in the runs that train, and tell webhooks what happened."""
    _exclusively("watch", watching.watch)


@app.task(name="workers.drop_points")
def drop_points() -> None:
    """Drop single points of old runs, where an admin's setting allows it."""
    _exclusively("drop points", retention.drop_all)


@app.task(name="workers.claim")
def claim() -> None:
    """Start this host's part of runs that others claimed; claim queued runs for it, then playground servers, and merges and
    pushes of its checkpoints.
    """
    _exclusively("claim", _claim)
    exporting.start_queued(devices.host_name())


def _claim() -> None:
    starting.start_for(devices.host_name())
    claiming.claim_for(devices.host_name())
    playground_claiming.claim_for(devices.host_name())


@app.task(name="workers.reap")
def reap() -> None:
    """End what dead supervisors of this host left behind."""
    _exclusively("reap", _reap)


def _reap() -> None:
    reaper.reap_host(devices.host_name())
    follower_reaping.reap_host(devices.host_name())
    reaping.reap_host(devices.host_name())


@worker_ready.connect
def report_for_duty(**_: object) -> None:
    """While a worker lives its host is known as alive; what happened before it started is looked at once."""
    threading.Thread(target=_report, daemon=True, name="host-report").start()


def _report() -> None:
    """Report for as long as the worker lives. A worker that can't any more ends, since its host would count as dead."""
    name = devices.host_name()
    first = True
    try:
        while True:
            try:
                devices.register_host(name)
                if first:
                    for task in (reap, claim):
                        task.apply_async(queue=f"host.{name}", expires=30)
                    first = False
            except (DatabaseError, InterfaceError, OperationalError) as error:
                logger.warning("Host %s could not report: %s", name, error)
            connection.close()
            time.sleep(REPORT_EVERY_S)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
