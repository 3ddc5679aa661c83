"""Reads series for charts, API and exports.

A resumed run has several attempts. Up to the step where a newer attempt begins an older one's points are part of the run's
curve; the rest is superseded, and comes as a trace of its own. At equal steps the newest attempt wins, within an attempt the
line written last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from django.db.models import Min, Q, QuerySet

from webapp.metrics.models import Block, PointKind, Series
from webapp.metrics.store import POINT
from webapp.runs.models import Attempt, Run

ROW = np.dtype([
    ("step", "<i8"), ("time", "<f8"), ("mean", "<f8"), ("low", "<f8"), ("high", "<f8"), ("finite", "<i8"),
    ("count", "<i8"), ("kinds", "<i8"),
])  # fmt: skip
"""Some points in a row, or one. `mean`, `low`, `high` are NaN without a finite value; bit k of `kinds`: some value has
PointKind k; `step` and `time` are the last point's."""

_MANY_BLOCKS = 1500
"""A series with more blocks than this is drawn from what the blocks say of themselves, where no edge cuts through one."""


@dataclass
class Part:
    """An attempt's place in its run: points from `end` on are superseded by a newer attempt."""

    attempt: Attempt
    start: int
    end: int | None = None


@dataclass
class Trace:
    """One line of a chart. `attempt` is None for the run's own curve, else the number of a superseded attempt."""

    metric: str
    attempt: int | None
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, ROW))


def parts(run: Run) -> list[Part]:
    """Attempts that have points, oldest first."""
    attempts = list(run.attempts.select_related("resumed_from").order_by("number"))
    starts = run.series.filter(points__gt=0).values_list("attempt_id").annotate(Min("first_step")).order_by()
    first_steps = dict(starts)
    result: list[Part] = []
    for attempt in attempts:
        if attempt.pk not in first_steps:
            continue
        start = attempt.resumed_from.step + 1 if attempt.resumed_from else first_steps[attempt.pk]
        for older in result:
            older.end = start if older.end is None else min(older.end, start)
        result.append(Part(attempt, start))
    return result


def traces(run_parts: Sequence[Part], metric: str, low: int | None = None, high: int | None = None) -> list[Trace]:
    """The run's curve of a metric, and what was superseded, between two steps (inclusive); none is empty."""
    found = {
        series.attempt_id: series
        for series in Series.objects.filter(attempt__in=[part.attempt for part in run_parts], name=metric)
    }
    current, old = [], []
    for part in run_parts:
        if part.attempt.pk not in found:
            continue
        rows = read_rows(found[part.attempt.pk], low, high, part.end)
        keep = np.ones(len(rows), bool) if part.end is None else rows["step"] < part.end
        current.append(rows[keep])
        if not keep.all():
            old.append(Trace(metric, part.attempt.number, rows[~keep]))
    curve = newest(np.concatenate(current)) if current else np.empty(0, ROW)
    return ([Trace(metric, None, curve)] if len(curve) else []) + old


def read_rows(series: Series, low: int | None = None, high: int | None = None, cut: int | None = None) -> np.ndarray:
    """Rows of a series by step, from `low` to `high`; where there are very many points, rows stand for blocks of them.

    No row mixes points from before and after `cut`, `low` or `high`.
    """
    blocks = sealed(series)
    if low is not None:
        blocks = blocks.filter(last_step__gte=low)
    if high is not None:
        blocks = blocks.filter(first_step__lte=high)
    tail = np.frombuffer(bytes(series.tail), POINT)
    pieces = None
    if series.blocks_written > _MANY_BLOCKS:
        pieces = _summaries(list(blocks.defer("data")), low, high, cut, tail)
    if pieces is None:
        data = [bytes(item) for item in blocks.values_list("data", flat=True)]
        pieces = [as_rows(np.frombuffer(b"".join(data), POINT))]
    rows = newest(np.concatenate([*pieces, as_rows(tail)]))
    first = np.searchsorted(rows["step"], low) if low is not None else 0
    last = np.searchsorted(rows["step"], high, side="right") if high is not None else len(rows)
    return rows[first:last]


def _summaries(
    blocks: list[Block], low: int | None, high: int | None, cut: int | None, tail: np.ndarray
) -> list[np.ndarray] | None:
    """Rows from the blocks' own columns, or None when there are few blocks, or repeated steps make their columns unfit."""
    if len(blocks) <= _MANY_BLOCKS or not all(block.ordered for block in blocks):
        return None
    if len(tail) and int(tail["step"].min()) <= blocks[-1].last_step:
        return None
    edges = [edge for edge in (low, None if high is None else high + 1, cut) if edge is not None]
    split = [block.pk for block in blocks if any(block.first_step < edge <= block.last_step for edge in edges)]
    datas = dict(Block.objects.filter(pk__in=split).values_list("pk", "data"))
    rows = np.zeros(len(blocks), ROW)
    for index, block in enumerate(blocks):
        mean = block.total / block.finite if block.finite else np.nan
        edge_low, edge_high = (np.nan, np.nan) if block.low is None else (block.low, block.high)
        rows[index] = (
            block.last_step, block.last_time, mean, edge_low, edge_high, block.finite, block.count, block.kinds
        )  # fmt: skip
    whole = np.array([block.pk not in datas for block in blocks])
    return [rows[whole], *(as_rows(np.frombuffer(bytes(data), POINT)) for data in datas.values())]


def as_rows(points: np.ndarray) -> np.ndarray:
    """Each point as a row of its own."""
    rows = np.zeros(len(points), ROW)
    value = points["value"]
    finite = np.isfinite(value)
    rows["step"], rows["time"], rows["count"], rows["finite"] = points["step"], points["time"], 1, finite
    rows["mean"] = rows["low"] = rows["high"] = np.where(finite, value, np.nan)
    kind = np.where(finite, PointKind.FINITE, np.where(np.isnan(value), PointKind.NAN, PointKind.POSITIVE_INFINITY))
    kind[value == -np.inf] = PointKind.NEGATIVE_INFINITY
    rows["kinds"] = 1 << kind
    return rows


def newest(rows: np.ndarray) -> np.ndarray:
    """Sorted by step; of rows with equal steps the one that comes last in the input."""
    steps = rows["step"]
    if len(rows) < 2 or (np.diff(steps) > 0).all():
        return rows
    rows = rows[np.argsort(steps, kind="stable")]
    return rows[np.append(rows["step"][1:] != rows["step"][:-1], True)]


def bucketed(rows: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` rows: neighbours are merged in buckets of 2^k steps, aligned at 0, so that a refresh moves none.

    Lowest and highest values survive, so that no spike is ever hidden.
    """
    if len(rows) <= limit:
        return rows
    steps = rows["step"]
    shift = (
        max(len(rows) // limit, 1).bit_length() - 1
    )  # smaller ones can't do: a bucket of 2^k steps holds 2^k rows at most
    while True:
        bucket = steps >> shift
        starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
        if len(starts) <= limit:
            break
        shift += 1
    merged = rows[np.append(starts[1:] - 1, len(rows) - 1)].copy()
    merged["low"] = np.fmin.reduceat(rows["low"], starts)
    merged["high"] = np.fmax.reduceat(rows["high"], starts)
    merged["count"] = np.add.reduceat(rows["count"], starts)
    merged["finite"] = np.add.reduceat(rows["finite"], starts)
    merged["kinds"] = np.bitwise_or.reduceat(rows["kinds"], starts)
    with np.errstate(invalid="ignore", over="ignore"):
        share = rows["finite"] / np.repeat(np.maximum(merged["finite"], 1), np.diff(np.append(starts, len(rows))))
        mean = np.add.reduceat(np.where(rows["finite"] > 0, rows["mean"], 0.0) * share, starts)
    merged["mean"] = np.where(merged["finite"] > 0, mean, np.nan)
    return merged


def points_of(series: Series, after_offset: int | None = None) -> np.ndarray:
    """All points of a series in the order they were written, or those from byte `after_offset` of the spool on."""
    tail = np.frombuffer(bytes(series.tail), POINT)
    if after_offset is not None and len(tail) and tail["offset"][0] <= after_offset:
        return tail[tail["offset"] >= after_offset]  # as usual for a live chart: no query
    blocks = sealed(series)
    if after_offset is not None:
        blocks = blocks.filter(last_offset__gte=after_offset)
    data = b"".join(bytes(item) for item in blocks.values_list("data", flat=True))
    points = np.concatenate([np.frombuffer(data, POINT), tail])
    return points if after_offset is None else points[points["offset"] >= after_offset]


def stream_points(series: Series, blocks_a_query: int = 64) -> Iterator[np.ndarray]:
    """All points in the order they were written, in pieces: memory does not grow with the series."""
    for start in range(0, series.blocks_written, blocks_a_query):
        window = sealed(series).filter(number__gte=start, number__lt=start + blocks_a_query)
        yield np.frombuffer(b"".join(bytes(item) for item in window.values_list("data", flat=True)), POINT)
    if series.tail:
        yield np.frombuffer(bytes(series.tail), POINT)


def sealed(series: Series) -> QuerySet[Block]:
    """The blocks that belong with the tail in this object; a supervisor may be adding more meanwhile."""
    return series.blocks.filter(number__lt=series.blocks_written).order_by("number")


def recent(run: Run, metrics: Sequence[str], count: int) -> dict[str, np.ndarray]:
    """The last `count` points of each metric in the newest attempt that has any, by step. Two queries."""
    found = list(
        run.series.filter(name__in=metrics, points__gt=0).select_related("attempt").order_by("attempt__number")
    )
    if not found:
        return {}
    newest_attempt = found[-1].attempt_id
    chosen = [series for series in found if series.attempt_id == newest_attempt]
    short = [series for series in chosen if len(series.tail) < count * POINT.itemsize and series.blocks_written]
    wanted = Q(pk__in=[])
    for series in short:
        wanted |= Q(series=series, number=series.blocks_written - 1)
    before = dict(Block.objects.filter(wanted).values_list("series_id", "data")) if short else {}
    return {
        series.name: newest(np.frombuffer(bytes(before.get(series.pk, b"")) + bytes(series.tail), POINT))[-count:]
        for series in chosen
    }
