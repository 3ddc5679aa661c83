"""Reads series for charts, API and exports.

A resumed run has several attempts. Up to the step where a newer attempt begins an older one's points are part of the run's
curve; the rest is superseded, and comes as a trace of its own. At equal steps the newest attempt wins, within an attempt the
line written last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from django.db.models import Min, Q

from webapp.metrics.layout import POINT, ROW, STORED_ROW, decode, newest
from webapp.metrics.models import Block, Series
from webapp.metrics.zoom import read_rows, sealed
from webapp.runs.models import Attempt, Run


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


def traces(
    run_parts: Sequence[Part], metrics: Sequence[str], low: int | None = None, high: int | None = None, rows: int = 2000
) -> dict[str, list[Trace]]:
    """For each metric the run's curve, and what was superseded, between two steps (inclusive); none is empty.

    Where there are many more points than `rows`, each row stands for several.
    """
    attempts = [part.attempt for part in run_parts]
    found = {
        (series.name, series.attempt_id): series for series in Series.objects.filter(attempt__in=attempts, name__in=metrics)
    }  # fmt: skip
    return {metric: _traces(run_parts, metric, found, low, high, rows) for metric in metrics}


def _traces(
    run_parts: Sequence[Part], metric: str, found: dict[tuple[str, Any], Series], low: int | None, high: int | None, rows: int
) -> list[Trace]:  # fmt: skip
    current, old = [], []
    for part in run_parts:
        series = found.get((metric, part.attempt.pk))
        if series is None:
            continue
        read = read_rows(series, low, high, part.end, rows)
        keep = np.ones(len(read), bool) if part.end is None else read["step"] < part.end
        current.append(read[keep])
        if not keep.all():
            old.append(Trace(metric, part.attempt.number, read[~keep]))
    curve = newest(np.concatenate(current)) if current else np.empty(0, ROW)
    return ([Trace(metric, None, curve)] if len(curve) else []) + old


def points_of(series: Series, after_offset: int) -> np.ndarray:
    """The points of a series from byte `after_offset` of the spool on, in the order they were written."""
    tail = decode(series.tail)
    if len(tail) and tail["offset"][0] <= after_offset:
        return tail[tail["offset"] >= after_offset]  # as usual for a live chart: no query
    blocks = sealed(series).filter(last_offset__gte=after_offset).values_list("data", flat=True)
    points = np.concatenate([*(decode(data) for data in blocks), tail])
    return points[points["offset"] >= after_offset]


def stream(series: Series, blocks_a_query: int = 64) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All points in the order they were written, in pieces: memory does not grow with the series. And how many each stands for.

    That is 1, or more for the mean of a rollup row, where retention has dropped the points themselves.
    """
    for start in range(0, series.blocks_written, blocks_a_query):
        window = sealed(series).filter(number__gte=start, number__lt=start + blocks_a_query)
        columns = ("data", "rollup", "last_offset") if series.dropped_points else ("data",)
        pieces = [_block_points(*block) for block in window.values_list(*columns)]
        yield np.concatenate([points for points, _ in pieces]), np.concatenate([counts for _, counts in pieces])
    if series.tail:
        tail = decode(series.tail)
        yield tail, np.ones(len(tail), "<i8")


def _block_points(data: bytes, rollup: bytes = b"", last_offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    if data or not rollup:
        points = decode(data)
        return points, np.ones(len(points), "<i8")
    rows = np.frombuffer(bytes(rollup), STORED_ROW)
    points = np.empty(len(rows), POINT)
    points["step"], points["time"], points["value"], points["offset"] = (
        rows["step"],
        rows["time"],
        rows["mean"],
        last_offset,
    )
    return points, rows["count"].astype("<i8")


def stream_points(series: Series) -> Iterator[np.ndarray]:
    """The points of `stream` alone."""
    return (points for points, _ in stream(series))


def recent(run: Run, metrics: Sequence[str], count: int) -> dict[str, np.ndarray]:
    """The last `count` points of each metric in the newest attempt that has any, by step. Two queries."""
    found = list(
        run.series.filter(name__in=metrics, points__gt=0).select_related("attempt").order_by("attempt__number")
    )
    if not found:
        return {}
    newest_attempt = found[-1].attempt_id
    tails = {series.pk: decode(series.tail) for series in found}
    chosen = [series for series in found if series.attempt_id == newest_attempt]
    wanted = Q(pk__in=[])
    for series in chosen:
        if len(tails[series.pk]) < count and series.blocks_written:
            wanted |= Q(series=series, number=series.blocks_written - 1)
    before = {pk: decode(data) for pk, data in Block.objects.filter(wanted).values_list("series_id", "data")}
    return {
        series.name: newest(np.concatenate([before.get(series.pk, tails[series.pk][:0]), tails[series.pk]]))[-count:]
        for series in chosen
    }
