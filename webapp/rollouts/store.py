"""Writes the rollouts that a run reports into the database."""

from __future__ import annotations

import math
from typing import Any

from django.db import transaction

from webapp.metrics.lines import Parsed, parse
from webapp.metrics.store import advance, at_time, write_events
from webapp.rollouts.models import RolloutTokens, StoredRollout
from webapp.rollouts.text import searchable
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
        for line in parsed.trained:
            _note_trained(attempt, line, parsed)
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
        rollout_id=str(rollout.get("rollout_id") or "")[:64], text=searchable(rollout),
    )  # fmt: skip


def _note_trained(attempt: Attempt, line: dict[str, Any], parsed: Parsed) -> None:
    """Add what the trainer said of a group; its rollouts were scored, and so stored, before."""
    trained = line["trained"]
    group = StoredRollout.objects.filter(attempt=attempt, run_id=attempt.run_id, group_id=trained["group_id"])
    if not group.update(trained_step=line["step"], staleness=trained["staleness"]):
        parsed.problems.append((line["at"], "a group was trained that is not stored"))
        return
    known = dict(group.values_list("rollout_id", "pk"))
    RolloutTokens.objects.bulk_create(
        (
            RolloutTokens(rollout_id=known[item["rollout_id"]], sequence=item["sequence"], data=item)
            for item in trained["rollouts"] if item["rollout_id"] in known
        ),
        ignore_conflicts=True,
    )  # fmt: skip
