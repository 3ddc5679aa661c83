"""Looks at what trains from time to time: alerts become events, and webhooks are told."""

from __future__ import annotations

from webapp.runs import alerts
from webapp.runs.models import Run, State
from webapp.webhooks import sending


def watch() -> None:
    """One look at every running run, then one at what webhooks do not know yet."""
    for run in Run.objects.filter(state=State.RUNNING):
        alerts.look_at(run)
    sending.send_due()
