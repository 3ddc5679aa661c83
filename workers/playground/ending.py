"""How a playground server ends: its state, and giving back what it held. Its supervisor and the reaper share this."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction

from webapp.playground.models import PlaygroundServer
from webapp.playground.services import change
from webapp.runs.lifecycle import record
from webapp.runs.models import ACTIVE, Event
from webapp.secrets.services import redactor_of
from workers import leases
from workers.ending import Outcome, not_given_back


def conclude(server: PlaygroundServer, outcome: Outcome | None, keep: Mapping[str, list[int]]) -> bool:
    """Write its end and release ports and devices but those in `keep`, in one transaction.

    Without an outcome the end is written already. False when this did not end it.
    """
    with transaction.atomic():
        changed = False
        if outcome is not None:
            log = redactor_of(server.run).json(outcome.log)
            changed = change(server, ACTIVE, outcome.state, outcome.reason, log=log)
        if keep and changed:
            record(server.run, "device_busy", not_given_back(keep), level=Event.Level.WARNING)
        leases.release(server, keep)
    return changed
