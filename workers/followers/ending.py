"""How a follower ends: its state, and giving back what it held. Its supervisor and the reaper share this."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction
from django.utils import timezone

from webapp.runs.lifecycle import record
from webapp.runs.models import ACTIVE, Event, Follower, State
from webapp.secrets.services import redactor_of
from workers import leases
from workers.ending import Outcome, not_given_back


def fail(follower: Follower, outcome: Outcome) -> bool:
    """Write why it ends, before its processes are ended: the attempt's own supervisor reads it when it misses them.

    False when its end was written before.
    """
    run, failed = follower.attempt.run, outcome.state == State.FAILED
    with transaction.atomic():
        reason = redactor_of(run).text(outcome.reason)
        changed = Follower.objects.filter(pk=follower.pk, state__in=ACTIVE).update(
            state=outcome.state, reason=reason, exit_code=outcome.exit_code, ended_at=timezone.now()
        )
        if changed and failed:
            level = Event.Level.ERROR
            record(run, "host_failed", reason, attempt=follower.attempt, level=level, host=follower.host.name,
                   log=outcome.log)  # fmt: skip
    return bool(changed)


def conclude(follower: Follower, outcome: Outcome, keep: Mapping[str, list[int]]) -> bool:
    """Write its end, if it is not written yet, and release its devices but those in `keep`. False when it was."""
    with transaction.atomic():
        changed = fail(follower, outcome)
        if keep and changed:
            record(follower.attempt.run, "device_busy", not_given_back(keep), attempt=follower.attempt,
                   level=Event.Level.WARNING)  # fmt: skip
        leases.release(follower, keep)
    return changed
