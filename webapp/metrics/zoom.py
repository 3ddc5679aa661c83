"""Reads a series at the coarseness a chart can show: rollup rows where they are exact, single points where they are not.

Rollup rows are in order and apart, since late points (see Block) are not in them. A row is replaced by its points when a late
point belongs among them, or an edge of the wanted range cuts through it; so the result is the same as if every point were read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from django.db.models import QuerySet

from webapp.metrics.appending import PACK_ROWS
from webapp.metrics.layout import FAN, ROW, STORED_ROW, as_rows, decode, newest
from webapp.metrics.models import Block, Pack, Series

FEW_BLOCKS = 32
"""Series of up to so many blocks are read point by point: one query, and less work than a look at rollups."""
_BLOCKS_A_QUERY = 500


@dataclass
class _Rolled:
    """Rollup rows, and for each the blocks it stands for: `size` of them from number `block` on."""

    rows: np.ndarray
    block: np.ndarray
    size: np.ndarray


def sealed(series: Series) -> QuerySet[Block]:
    """The blocks that belong with the tail in this object; a supervisor may be adding more meanwhile."""
    return series.blocks.filter(number__lt=series.blocks_written).order_by("number")


def read_rows(
    series: Series, low: int | None = None, high: int | None = None, cut: int | None = None, rows: int = 2000
) -> np.ndarray:
    """Rows of a series by step, from `low` to `high` (inclusive).

    Each stands for several points when there are many more than `rows` of these; then there are at least half as many rows.
    None mixes points from before and after `cut`.
    """
    tail = decode(series.tail)
    if series.blocks_written <= FEW_BLOCKS and not series.dropped_points:
        data = sealed(series).values_list("data", flat=True) if series.blocks_written else []
        found = as_rows(newest(np.concatenate([*(decode(item) for item in data), tail])))
    else:
        found = _zoomed(series, tail, low, high, cut, rows // 2)
    first = np.searchsorted(found["step"], low) if low is not None else 0
    last = np.searchsorted(found["first"], high, side="right") if high is not None else len(found)
    return found[first:last]


def _zoomed(
    series: Series, tail: np.ndarray, low: int | None, high: int | None, cut: int | None, wanted: int
) -> np.ndarray:
    rolled = _rolled(series, low, high, wanted)
    every_point = len(rolled.rows) * FAN < wanted
    if not every_point and len(rolled.rows) < wanted:
        rolled = _from_blocks(series, rolled)
    late = _late_points(series, tail, low, high)
    first, last = rolled.rows["first"], rolled.rows["step"]
    if every_point:
        opened = np.ones(len(first), bool)
    else:
        steps = np.unique(np.concatenate([points["step"] for _, points in late])) if late else np.empty(0, "<i8")
        opened = np.searchsorted(steps, first) < np.searchsorted(steps, last, side="right")
        for edge in (low, None if high is None else high + 1, cut):
            if edge is not None:
                opened |= (first < edge) & (edge <= last)
    pieces, left = _fresh_points(series, rolled, opened)
    pieces = sorted([*pieces, *late], key=lambda piece: piece[0])
    above = series.sealed_max_step
    points = np.concatenate([*(points for _, points in pieces), tail[tail["step"] > above]])
    whole = np.concatenate([rolled.rows[~opened & (rolled.rows["count"] > 0)], *left]).astype(ROW)
    return newest(np.concatenate([whole, as_rows(newest(points))]))


def _rolled(series: Series, low: int | None, high: int | None, wanted: int) -> _Rolled:
    """Rows of the coarsest level that has at least `wanted` of them in the range, else of the finest: one a block."""
    level = 0
    while series.blocks_written // FAN ** (level + 1) >= (wanted if low is None and high is None else FAN):
        level += 1
    rolled = _from_packs(series, level, low, high, 0, series.blocks_written)
    while level > 0 and len(rolled.rows) < wanted:
        if not len(rolled.rows):
            return rolled  # the range holds nothing but what is in the tail
        level -= 1
        end = int((rolled.block + rolled.size).max())
        rolled = _from_packs(series, level, low, high, int(rolled.block.min()), end)
    return rolled


def _from_packs(
    series: Series, level: int, low: int | None, high: int | None, first_block: int, end_block: int
) -> _Rolled:
    """Rows of a level that meet the range, and of finer ones for the last blocks, which fill no row of this level yet.

    They are looked for from block `first_block` up to `end_block`.
    """
    rows, blocks, sizes = [], [], []
    start = 0
    for finer in range(level, -1, -1):
        size = FAN**finer
        stop = series.blocks_written // size * size
        begin, end = max(start, first_block) // size, min(stop // size, -(-end_block // size))
        start = stop
        if begin >= end:
            continue
        for number, data in _packs(series, finer, begin, end, low, high):
            held = np.frombuffer(bytes(data), STORED_ROW)
            index = np.arange(len(held)) + number * PACK_ROWS
            keep = (index >= begin) & (index < end)
            if low is not None:
                keep &= held["step"] >= low
            if high is not None:
                keep &= held["first"] <= high
            rows.append(held[keep])
            blocks.append(index[keep] * size)
            sizes.append(np.full(int(keep.sum()), size))
    if not rows:
        return _Rolled(np.empty(0, STORED_ROW), np.empty(0, "<i8"), np.empty(0, "<i8"))
    return _Rolled(np.concatenate(rows), np.concatenate(blocks), np.concatenate(sizes))


def _packs(
    series: Series, level: int, first: int, end: int, low: int | None, high: int | None
) -> Iterable[tuple[int, bytes | memoryview]]:
    found = Pack.objects.filter(
        series=series, level=level, number__gte=first // PACK_ROWS, number__lte=(end - 1) // PACK_ROWS
    )
    if low is not None:
        found = found.filter(last_step__gte=low)
    if high is not None:
        found = found.filter(first_step__lte=high)
    return found.order_by("number").values_list("number", "data")


def _from_blocks(series: Series, blocks: _Rolled) -> _Rolled:
    """The finer rows that lie in the blocks themselves."""
    numbers, pieces = [], []
    for number, rollup in _in_blocks(series, blocks.block, "rollup"):
        piece = np.frombuffer(bytes(rollup), STORED_ROW)
        pieces.append(piece)
        numbers.append(np.full(len(piece), number))
    rows = np.concatenate([np.empty(0, STORED_ROW), *pieces])
    return _Rolled(rows, np.concatenate([np.empty(0, "<i8"), *numbers]), np.ones(len(rows), "<i8"))


def _in_blocks(series: Series, numbers: np.ndarray, *columns: str) -> Iterable[tuple[int, ...]]:
    """Number and columns of blocks, in order. Neighbours are asked for as one range, others in lists, which use the index."""
    numbers = np.unique(numbers)
    if not len(numbers):
        return
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == len(numbers):
        yield from (
            series.blocks.filter(number__gte=first, number__lte=last).order_by("number").values_list("number", *columns)
        )
        return
    for start in range(0, len(numbers), _BLOCKS_A_QUERY):
        part = numbers[start : start + _BLOCKS_A_QUERY].tolist()
        yield from series.blocks.filter(number__in=part).order_by("number").values_list("number", *columns)


def _late_points(series: Series, tail: np.ndarray, low: int | None, high: int | None) -> list[tuple[int, np.ndarray]]:
    """(block number, late points) that are in the range, the tail's with the number of the block to come."""
    found = []
    if series.late_points:
        blocks = sealed(series).filter(late__gt=0).values_list("number", "after_step", "data")
        for number, after_step, data in blocks:
            points = decode(data)
            found.append((number, points[points["step"] <= after_step]))
    above = series.sealed_max_step
    found.append((series.blocks_written, tail[tail["step"] <= above]))
    inside = []
    for number, points in found:
        keep = np.ones(len(points), bool)
        if low is not None:
            keep &= points["step"] >= low
        if high is not None:
            keep &= points["step"] <= high
        if keep.any():
            inside.append((number, points[keep]))
    return inside


def _fresh_points(
    series: Series, rolled: _Rolled, opened: np.ndarray
) -> tuple[list[tuple[int, np.ndarray]], list[np.ndarray]]:
    """(block number, points that are not late) of the rows to be opened; and finest rows where retention left no points."""
    if not opened.any():
        return [], []
    first, last = rolled.rows["first"][opened], rolled.rows["step"][opened]
    sizes, starts = rolled.size[opened], rolled.block[opened]
    numbers = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])

    def inside(items: np.ndarray) -> np.ndarray:
        row = np.searchsorted(first, items["step"], side="right") - 1  # rows are in order and apart
        return items[(row >= 0) & (items["step"] <= last[np.maximum(row, 0)])]

    pieces, left = [], []
    columns = ("after_step", "data", "rollup") if series.dropped_points else ("after_step", "data")
    for number, after_step, data, *rollup in _in_blocks(series, numbers, *columns):
        if not data and rollup:
            left.append(inside(np.frombuffer(bytes(rollup[0]), STORED_ROW)))  # type: ignore[call-overload]
            continue
        points = decode(data)  # type: ignore[arg-type]
        if after_step is not None:
            points = points[points["step"] > after_step]
        pieces.append((number, inside(points)))
    return pieces, left
