"""Writes what a run reports into the database: points, latest values, events, checkpoints, the run's summary.

`ship_spool` is the only way in. Reading is in reading.py; layout.py has the layout of points, which both share.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import numpy as np
from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from trainer_core.spool import encode_number
from webapp.checkpoints.models import EVALUATED, Checkpoint
from webapp.metrics import points
from webapp.metrics.lines import Parsed, parse
from webapp.metrics.zoom import read_rows
from webapp.runs.models import Attempt, Event, Run

SUMMARY = {
    "reward": "reward",
    "tok_s": "perf/forwarded_tok_s_wall_clock",
    "generated_tok_s": "rollout/generated_tok_s",
    "staleness": "sample/staleness_mean",
    "epoch": "epoch",
}
"""Keys of `Run.summary` and the metrics whose latest values they hold. Beside them: step, max_steps, time (Unix seconds).

A value that is not finite has no key; `<key>_kind` is then "nan", "inf" or "-inf".
"""


class WrongOffset(Exception):
    """The chunk does not begin where the database ends; nothing was written. `expected` says where to go on."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(f"The chunk begins at byte {found}, but {expected} bytes are stored; go on from there.")
        self.expected = expected


def ship_spool(attempt: Attempt, offset: int, chunk: bytes) -> int:
    """Store the whole lines of `chunk`, which begins at byte `offset` of the attempt's spool.jsonl.

    Returns the offset to go on from: a torn last line is left for the next call, which must offer it again, with more bytes.
    Everything happens in one transaction that also moves `attempt.spool_offset`, so a call that is repeated or cut off
    neither doubles nor loses a point. A line that can't be understood is skipped; one warning event says how many and why.
    A line of more than `lines.MAX_LINE_BYTES` is given up, so pieces must be offered at least that large when a line is.

    Raises WrongOffset, and writes nothing, when `offset` is not `attempt.spool_offset` of the database.
    """
    parsed = parse(chunk, offset)
    for line in (*parsed.rollouts, *parsed.trained):
        parsed.problems.append((line["at"], f"a {line['kind']} line belongs in rollouts.jsonl"))
    with transaction.atomic():
        new_offset = advance(attempt, "spool_offset", offset, parsed.consumed)
        last_reward = points.save(attempt, parsed)
        _write_summary(attempt, parsed)
        write_events(attempt, parsed)
        _write_checkpoints(attempt, parsed, last_reward)
    attempt.spool_offset = new_offset
    return new_offset


def advance(attempt: Attempt, column: str, offset: int, consumed: int) -> int:
    """Move an offset column of the attempt from `offset` by compare-and-swap. Raises WrongOffset. Call in a transaction."""
    new_offset = offset + consumed
    if not Attempt.objects.filter(pk=attempt.pk, **{column: offset}).update(**{column: new_offset}):
        raise WrongOffset(offset, Attempt.objects.values_list(column, flat=True).get(pk=attempt.pk))
    return new_offset


def write_events(attempt: Attempt, parsed: Parsed) -> None:
    """Store the events of a piece, and one warning for all lines that could not be understood."""
    events = [
        Event(
            run_id=attempt.run_id, attempt=attempt, created_at=at_time(event["t"]), step=event["step"], level=event["level"],
            name=event["name"], text=event["text"], data=event["data"],
        )
        for event in parsed.events
    ]  # fmt: skip
    if parsed.problems:
        at, reason = parsed.problems[0]
        count = len(parsed.problems)
        what = "A line of the run's reports" if count == 1 else f"{count} lines or values of the run's reports"
        events.append(
            Event(
                run_id=attempt.run_id, attempt=attempt, created_at=timezone.now(), level=Event.Level.WARNING,
                name="spool_malformed", text=f"{what} can't be read and is left out: at byte {at}, {reason}."[:1000],
                data={"at": at, "count": count},
            )
        )  # fmt: skip
    Event.objects.bulk_create(events)


def at_time(unix_seconds: float) -> datetime:
    return datetime.fromtimestamp(unix_seconds, UTC)


def _write_summary(attempt: Attempt, parsed: Parsed) -> None:
    """Put latest values into `Run.summary`, unless a newer attempt has begun."""
    if not parsed.steps:
        return
    newer = Attempt.objects.filter(run=OuterRef("pk"), number__gt=attempt.number)
    of_run = Run.objects.filter(pk=attempt.run_id)
    before, max_steps, is_old = (
        of_run.select_for_update().values_list("summary", "spec__training__max_steps", Exists(newer)).get()
    )
    if is_old:
        return
    summary = {**before, "time": parsed.times[-1], "max_steps": max_steps}
    for key, name in SUMMARY.items():
        if name in parsed.columns:
            _note(summary, key, float(parsed.columns[name].values[-1]))
    if loss := parsed.columns.get("loss"):  # an optimizer step; other lines may come between two of them
        summary["step"] = parsed.steps[loss.lines[-1]]
    else:
        summary.setdefault("step", parsed.steps[-1])
    of_run.update(summary=summary)


def _note(summary: dict[str, Any], key: str, value: float) -> None:
    """Leave out what is not finite, so that it sorts last and matches no filter; `<key>_kind` then says what it is."""
    summary.pop(f"{key}_kind", None)
    if math.isfinite(value):
        summary[key] = value
    else:
        summary.pop(key, None)
        summary[f"{key}_kind"] = encode_number(value)


def _write_checkpoints(attempt: Attempt, parsed: Parsed, last_reward: float | None) -> None:
    """`last_reward` is the attempt's from before this piece, if the piece has any. Points and events are stored already."""
    checkpoints = [event for event in parsed.events if event["name"] == "checkpoint"]
    if not checkpoints:
        return
    rewards = _rewards(attempt, parsed, last_reward)
    for event in checkpoints:
        data, step = event["data"], event["step"]
        kind = data.get("kind") if data.get("kind") in Checkpoint.Kind.values else Checkpoint.Kind.FULL
        size = data.get("size_bytes")
        known = [reward for offset, reward in rewards if offset < event["at"] and math.isfinite(reward)]
        Checkpoint.objects.filter(run_id=attempt.run_id, step=step, deleted_at=None).exclude(attempt=attempt).update(
            deleted_at=timezone.now()  # its folder has just been replaced by this one
        )
        Checkpoint.objects.update_or_create(
            run_id=attempt.run_id, attempt=attempt, step=step,
            defaults={
                "kind": kind, "size_bytes": size if type(size) is int and 0 <= size < 2**63 else 0, "deleted_at": None,
                "reward": known[-1] if known else None, "evaluation": _evaluation(attempt, step),
                "created_at": at_time(event["t"]),
            },
        )  # fmt: skip
    _mark_best(attempt.run_id)


def _evaluation(attempt: Attempt, step: int) -> dict[str, float]:
    """What the attempt's evaluation of this very step measured; empty when there was none."""
    found = {}
    for series in attempt.series.filter(name__in=EVALUATED, points__gt=0):
        rows = read_rows(series, step, step)
        if len(rows) and math.isfinite(rows["mean"][-1]):
            found[series.name] = float(rows["mean"][-1])
    return found


def _mark_best(run_id: UUID) -> None:
    """The trainer names its best evaluation before it writes that step's checkpoint; the last one named counts."""
    named = Event.objects.filter(run_id=run_id, name="best").order_by("-id").values_list("attempt_id", "step").first()
    checkpoints = Checkpoint.objects.filter(run_id=run_id)
    if named is not None and named[1] is not None and checkpoints.filter(attempt_id=named[0], step=named[1]).exists():
        checkpoints.update(best=Q(attempt_id=named[0], step=named[1]))


def _rewards(attempt: Attempt, parsed: Parsed, last_reward: float | None) -> list[tuple[int, float]]:
    """(byte, reward) of the rewards known with this piece, the last one from before it first."""
    if column := parsed.columns.get("reward"):
        offsets = np.array(parsed.offsets)[column.lines].tolist()
        own = list(zip(offsets, column.values.tolist(), strict=True))
    else:
        own = []
        last_reward = attempt.series.filter(name="reward").values_list("last_value", flat=True).first()
    return own if last_reward is None else [(-1, last_reward), *own]
