"""Adds points to a series: fills its tail, seals blocks, rolls them up. Changes objects in memory; store.py saves them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from webapp.metrics.layout import FAN, STORED_ROW, as_rows, decode, encode, merge, newest
from webapp.metrics.models import PointKind

BLOCK_POINTS = 256
PACK_ROWS = 256


@dataclass
class Appended:
    """What became full: columns of new Blocks, and the rollup row of each."""

    blocks: list[dict[str, Any]]
    rows: np.ndarray


def kind_of(value: float) -> PointKind:
    """The PointKind of a number."""
    if math.isfinite(value):
        return PointKind.FINITE
    if math.isnan(value):
        return PointKind.NAN
    return PointKind.POSITIVE_INFINITY if value > 0 else PointKind.NEGATIVE_INFINITY


def append(series: Any, new: np.ndarray) -> Appended:
    """Add POINT records, of which there is at least one, to the Series object. Saves nothing."""
    points = np.concatenate([decode(series.tail), new])
    last = new[-1]
    series.points += len(new)
    smallest = int(new["step"].min())
    series.first_step = smallest if series.first_step is None else min(series.first_step, smallest)
    series.last_step, series.last_time = int(last["step"]), float(last["time"])
    series.last_kind = kind_of(float(last["value"]))
    series.last_value = float(last["value"]) if series.last_kind == PointKind.FINITE else None
    series.last_offset = int(last["offset"])
    ends = list(cuts(points["step"]))
    sealed = [points[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    series.tail = encode(points[ends[-1] :] if ends else points)
    return _seal(series, sealed) if sealed else Appended([], np.empty(0, STORED_ROW))


def cuts(steps: np.ndarray) -> Iterator[int]:
    """Where blocks end. A step that is reported several times in a row is not cut in two, unless it fills a block."""
    start = 0
    while len(steps) - start > BLOCK_POINTS:
        window = steps[start : start + BLOCK_POINTS + 1]
        size = BLOCK_POINTS
        if window[-1] == window[-2]:
            changes = np.flatnonzero(window[1:] != window[:-1])
            size = int(changes[-1]) + 1 if len(changes) else BLOCK_POINTS
        start += size
        yield start


def _seal(series: Any, sealed: Sequence[np.ndarray]) -> Appended:
    """Full blocks, as columns of Block, and their rollup rows; those of all blocks are made at once."""
    blocks, fresh = [], []
    for points in sealed:
        before: int | None = series.sealed_max_step
        steps = points["step"]
        lowest, highest = int(steps.min()), int(steps.max())
        kept = points if before is None or lowest > before else points[steps > before]
        fresh.append(newest(kept))
        blocks.append({
            "number": series.blocks_written, "first_step": lowest, "last_step": highest, "after_step": before,
            "last_offset": int(points["offset"][-1]), "late": len(points) - len(kept), "data": encode(points),
        })  # fmt: skip
        series.blocks_written += 1
        series.late_points += len(points) - len(kept)
        series.sealed_max_step = highest if before is None else max(before, highest)
    sizes = np.array([len(points) for points in fresh])
    begins = np.cumsum(sizes) - sizes
    starts = [np.arange(begin, begin + size, FAN) for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
    small = merge(as_rows(np.concatenate(fresh)), np.concatenate(starts)).astype(STORED_ROW)
    counts = np.array([len(part) for part in starts])
    begins = np.cumsum(counts) - counts
    whole = np.empty(len(blocks), STORED_ROW)
    whole[counts > 0] = merge(small, begins[counts > 0]).astype(STORED_ROW)
    for index, (begin, count) in enumerate(zip(begins.tolist(), counts.tolist(), strict=True)):
        blocks[index]["rollup"] = small[begin : begin + count].tobytes()
        if not count:
            whole[index] = _nothing(blocks[index]["after_step"], float(sealed[index]["time"][-1]))
    return Appended(blocks, whole)


def _nothing(step: int, time: float) -> tuple[float, ...]:
    """The row of a block with late points only: it holds the place of its number."""
    return (step, step, time, np.nan, np.nan, np.nan, 0, 0, 0)


def roll_up(
    written: int, new: np.ndarray, open_packs: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Packs (level, number, rows) that change when rows for `new` blocks come after `written` ones.

    `open_packs` has the rows of each level's last pack while it is not full.
    """
    level = 0
    while len(new):
        held = open_packs.get(level, np.empty(0, STORED_ROW))
        rows = np.concatenate([held, new])
        base = written - len(held)
        for start in range(0, len(rows), PACK_ROWS):
            yield level, (base + start) // PACK_ROWS, rows[start : start + PACK_ROWS]
        begin, end = written // FAN * FAN - base, (written + len(new)) // FAN * FAN - base
        new = merge(rows[begin:end], np.arange(0, end - begin, FAN)).astype(STORED_ROW)
        written //= FAN
        level += 1


def pack_columns(level: int, number: int, rows: np.ndarray) -> dict[str, Any]:
    """Columns of a Pack."""
    return {
        "level": level, "number": number, "first_step": int(rows["first"][0]), "last_step": int(rows["step"][-1]),
        "full": len(rows) == PACK_ROWS, "data": rows.tobytes(),
    }  # fmt: skip
