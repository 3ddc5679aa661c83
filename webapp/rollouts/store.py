"""Writes the rollouts that a run reports into the database."""

from __future__ import annotations

import math
from typing import Any

from django.db import transaction

from webapp.metrics.lines import parse
from webapp.metrics.store import advance, at_time, write_events
from webapp.rollouts.models import StoredRollout
from webapp.runs.models import Attempt


def ship_rollouts(attempt: Attempt, offset: int, chunk: bytes) -> int:
    """Store the whole lines of `chunk`, which begins at byte `offset` of the attempt's rollouts.jsonl.

    Works like `webapp.metrics.store.ship_spool`: one transaction, a torn last line is left for the next call, a line that
    can't be understood is skipped with a warning event. Returns the offset to go on from; raises WrongOffset.
    """
    parsed = parse(chunk, offset)
    parsed.problems += [(at, "a metrics line belongs in spool.jsonl") for at in parsed.offsets]
    with transaction.atomic():
        new_offset = advance(attempt, "rollouts_offset", offset, parsed.consumed)
        StoredRollout.objects.bulk_create((_stored(attempt, line) for line in parsed.rollouts), batch_size=100)
        write_events(attempt, parsed)
    attempt.rollouts_offset = new_offset
    return new_offset


def _stored(attempt: Attempt, line: dict[str, Any]) -> StoredRollout:
    rollout = line["rollout"]
    reward = rollout.get("reward")
    finite = type(reward) in (int, float) and math.isfinite(reward)
    return StoredRollout(
        run_id=attempt.run_id, attempt=attempt, step=line["step"], group_id=rollout["group_id"],
        row_index=rollout["row_index"], reward=reward if finite else None, created_at=at_time(line["t"]), data=rollout,
    )  # fmt: skip
