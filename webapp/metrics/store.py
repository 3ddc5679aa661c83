"""Writes what a run reports into the database: points, latest values, events, checkpoints, the run's summary.

`ship_spool` is the only way in. Reading is in reading.py; layout.py has the layout of points, which both share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.db import connection, transaction
from django.utils import timezone

from trainer_core.spool import encode_number
from webapp.checkpoints.models import Checkpoint
from webapp.metrics.appending import Appended, append, pack_columns, roll_up
from webapp.metrics.layout import POINT, STORED_ROW
from webapp.metrics.lines import Column, Parsed, parse
from webapp.metrics.models import Block, Pack, Series
from webapp.runs.models import Attempt, Event, Run

_IDS_A_QUERY = 500
_ROWS_A_QUERY = 50

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
        last_reward = _write_points(attempt, parsed)
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


def _write_points(attempt: Attempt, parsed: Parsed) -> list[tuple[int, float]]:
    """Append points to their series. Returns (offset, reward) of the rewards known, the one before this piece first."""
    if not parsed.columns:
        return _known_reward(attempt)
    lines = np.zeros(len(parsed.steps), POINT)
    lines["step"], lines["time"], lines["offset"] = parsed.steps, parsed.times, parsed.offsets
    series_of = _series(attempt, list(parsed.columns))
    rewards = _known_reward(attempt)
    updates: list[tuple[Any, ...]] = []
    sealed: list[tuple[Series, int, Appended]] = []
    for name, column in parsed.columns.items():
        points = _points(lines, column)
        if name == "reward":
            rewards += list(zip(points["offset"].tolist(), points["value"].tolist(), strict=True))
        series = series_of[name]
        written = series.blocks_written
        appended = append(series, points)
        if appended.blocks:
            sealed.append((series, written, appended))
        updates.append((
            series.points, series.first_step, series.last_step, series.last_time, series.last_value, series.last_kind,
            series.last_offset, series.blocks_written, series.sealed_max_step, series.late_points, series.tail, series.pk,
        ))  # fmt: skip
    _write_sealed(sealed)
    with connection.cursor() as cursor:
        cursor.executemany(
            f"UPDATE {Series._meta.db_table} SET points=%s, first_step=%s, last_step=%s, last_time=%s, last_value=%s, "
            "last_kind=%s, last_offset=%s, blocks_written=%s, sealed_max_step=%s, late_points=%s, tail=%s WHERE id=%s",
            updates,
        )
    return rewards


def _write_sealed(sealed: Sequence[tuple[Series, int, Appended]]) -> None:
    """Save blocks that became full, and the rollups over them."""
    blocks = [Block(series=series, **columns) for series, _, appended in sealed for columns in appended.blocks]
    Block.objects.bulk_create(blocks, batch_size=_ROWS_A_QUERY)
    packs = []
    for part in _parts(sealed):
        open_packs: dict[int, dict[int, np.ndarray]] = {}
        for pack in Pack.objects.filter(series__in=[series for series, _, _ in part], full=False):
            open_packs.setdefault(pack.series_id, {})[pack.level] = np.frombuffer(bytes(pack.data), STORED_ROW)
        for series, written, appended in part:
            for changed in roll_up(written, appended.rows, open_packs.get(series.pk, {})):
                packs.append(Pack(series=series, **pack_columns(*changed)))
    Pack.objects.bulk_create(
        packs, batch_size=_ROWS_A_QUERY, update_conflicts=True, unique_fields=("series", "level", "number"),
        update_fields=("first_step", "last_step", "full", "data"),
    )  # fmt: skip


def _points(lines: np.ndarray, column: Column) -> np.ndarray:
    points = lines[column.lines]
    points["value"] = column.values
    return points


def _series(attempt: Attempt, names: Sequence[str]) -> dict[str, Series]:
    """The attempt's series of these names; missing ones are made."""
    found: dict[str, Series] = {}
    for part in _parts(names):
        found |= {series.name: series for series in Series.objects.filter(attempt=attempt, name__in=part)}
    missing = [Series(run_id=attempt.run_id, attempt=attempt, name=name) for name in names if name not in found]
    Series.objects.bulk_create(missing, batch_size=_ROWS_A_QUERY)
    return found | {series.name: series for series in missing}


def _parts(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (items[start : start + _IDS_A_QUERY] for start in range(0, len(items), _IDS_A_QUERY))


def _known_reward(attempt: Attempt) -> list[tuple[int, float]]:
    last = Series.objects.filter(attempt=attempt, name="reward").values_list("last_value", flat=True).first()
    return [] if last is None else [(-1, last)]


def _write_summary(attempt: Attempt, parsed: Parsed) -> None:
    """Put latest values into `Run.summary`, unless a newer attempt has begun."""
    if not parsed.steps:
        return
    run = Run.objects.select_for_update().get(pk=attempt.run_id)
    if Attempt.objects.filter(run_id=run.pk, number__gt=attempt.number).exists():
        return
    summary = {**run.summary, "time": parsed.times[-1], "max_steps": run.spec.get("training", {}).get("max_steps")}
    for key, name in SUMMARY.items():
        if name in parsed.columns:
            _note(summary, key, float(parsed.columns[name].values[-1]))
    if loss := parsed.columns.get("loss"):  # an optimizer step; other lines may come between two of them
        summary["step"] = parsed.steps[loss.lines[-1]]
    else:
        summary.setdefault("step", parsed.steps[-1])
    Run.objects.filter(pk=run.pk).update(summary=summary)


def _note(summary: dict[str, Any], key: str, value: float) -> None:
    """Leave out what is not finite, so that it sorts last and matches no filter; `<key>_kind` then says what it is."""
    summary.pop(f"{key}_kind", None)
    if math.isfinite(value):
        summary[key] = value
    else:
        summary.pop(key, None)
        summary[f"{key}_kind"] = encode_number(value)


def _write_checkpoints(attempt: Attempt, parsed: Parsed, rewards: list[tuple[int, float]]) -> None:
    for event in parsed.events:
        if event["name"] != "checkpoint":
            continue
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
                "reward": known[-1] if known else None, "created_at": at_time(event["t"]),
            },
        )  # fmt: skip
