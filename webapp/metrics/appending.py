"""Adds points to a series: fills its tail, seals blocks, rolls them up. Changes objects in memory; store.py saves them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from webapp.metrics.layout import FAN, STORED_ROW, decode_lines, encode, merge, newest_of, split, table_rows
from webapp.metrics.models import PointKind

BLOCK_POINTS = 256
PACK_ROWS = 256


@dataclass
class Appended:
    """What became full: for each series the columns of its new Blocks, and rollup rows, of the shape (series, blocks)."""

    blocks: list[list[dict[str, Any]]]
    rows: np.ndarray


def kind_of(value: float) -> PointKind:
    """The PointKind of a number."""
    if math.isfinite(value):
        return PointKind.FINITE
    if math.isnan(value):
        return PointKind.NAN
    return PointKind.POSITIVE_INFINITY if value > 0 else PointKind.NEGATIVE_INFINITY


def place(series: Any) -> tuple[Any, ...]:
    """What must be equal for several Series objects to be appended to together, since their points then lie on equal lines."""
    return split(bytes(series.tail))[0], series.blocks_written, series.sealed_max_step


def append(several: Sequence[Any], lines: np.ndarray, values: np.ndarray) -> Appended:
    """Add points to Series objects of one `place`. Saves nothing.

    `lines` are POINT records, at least one, whose values don't matter; `values` has the shape (series, lines).
    """
    tails = [split(bytes(series.tail)) for series in several]
    lines = np.concatenate([decode_lines(tails[0][0]), lines])
    first, last = int(lines["step"].min()), lines[-1]
    added = values.shape[1]
    values = np.concatenate([np.stack([tail for _, tail in tails]), values], axis=1)
    ends = list(cuts(lines["step"]))
    *sealed, open_ = encode(lines, values, [0, *ends])
    for series, tail, value in zip(several, open_, values[:, -1].tolist(), strict=True):
        series.points += added
        series.first_step = first if series.first_step is None else min(series.first_step, first)
        series.last_step, series.last_time = int(last["step"]), float(last["time"])
        series.last_kind = kind_of(value)
        series.last_value = value if series.last_kind == PointKind.FINITE else None
        series.last_offset = int(last["offset"])
        series.tail = tail
    return _seal(several, lines, values, ends, sealed)


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


def _seal(
    several: Sequence[Any], lines: np.ndarray, values: np.ndarray, ends: Sequence[int], data: Sequence[Sequence[bytes]]
) -> Appended:  # fmt: skip
    """Full blocks, as columns of Block, and their rollup rows; those of all blocks are made at once."""
    if not ends:
        return Appended([[] for _ in several], np.empty((len(several), 0), STORED_ROW))
    number, before = several[0].blocks_written, several[0].sealed_max_step
    chosen: list[np.ndarray] = []
    columns: list[dict[str, Any]] = []
    for start, stop in pairwise([0, *ends]):
        part = lines["step"][start:stop]
        lowest, highest = int(part.min()), int(part.max())
        kept = np.arange(start, stop) if before is None or lowest > before else start + np.flatnonzero(part > before)
        order = newest_of(lines["step"][kept])
        chosen.append(kept if order is None else kept[order])
        columns.append({
            "number": number + len(columns), "first_step": lowest, "last_step": highest, "after_step": before,
            "last_offset": int(lines["offset"][stop - 1]), "late": stop - start - len(kept),
        })  # fmt: skip
        before = highest if before is None else max(before, highest)
    for series in several:
        series.blocks_written, series.sealed_max_step = number + len(columns), before
        series.late_points += sum(block["late"] for block in columns)
    picked = np.concatenate(chosen)
    begins = _edges([len(part) for part in chosen]).tolist()
    starts = [np.arange(begin, end, FAN) for begin, end in pairwise(begins)]
    small = merge(table_rows(lines[picked], values[:, picked]), np.concatenate(starts)).astype(STORED_ROW)
    edges = _edges([len(part) for part in starts])
    filled = edges[1:] > edges[:-1]
    whole = np.empty((len(several), len(columns)), STORED_ROW)
    whole[:, filled] = merge(small, edges[:-1][filled])
    for index in np.flatnonzero(~filled):
        whole[:, index] = _nothing(columns[index]["after_step"], float(lines["time"][ends[index] - 1]))
    at = (edges * STORED_ROW.itemsize).tolist()
    blocks = []
    for row in range(len(several)):
        rollup = small[row].tobytes()
        blocks.append([
            {**block, "rollup": rollup[at[index] : at[index + 1]], "data": data[index][row]}
            for index, block in enumerate(columns)
        ])  # fmt: skip
    return Appended(blocks, whole)


def _edges(sizes: Sequence[int]) -> np.ndarray:
    """Where neighbours of these sizes begin, and the last one ends."""
    return np.append(0, np.cumsum(sizes))


def _nothing(step: int, time: float) -> tuple[float, ...]:
    """The row of a block with late points only: it holds the place of its number."""
    return (step, step, time, np.nan, np.nan, np.nan, 0, 0, 0)


def roll_up(
    written: int, new: np.ndarray, open_packs: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Packs (level, number, rows) that change when rows for `new` blocks come after `written` ones.

    `open_packs` has the rows of each level's last pack while it is not full. Rows have the shape (series, rows).
    """
    level = 0
    while new.shape[1]:
        held = open_packs.get(level)
        rows = new if held is None else np.concatenate([held, new], axis=1)
        base = written - rows.shape[1] + new.shape[1]
        for start in range(0, rows.shape[1], PACK_ROWS):
            yield level, (base + start) // PACK_ROWS, rows[:, start : start + PACK_ROWS]
        begin, end = written // FAN * FAN - base, (written + new.shape[1]) // FAN * FAN - base
        written //= FAN
        new = merge(rows[:, begin:end], np.arange(0, end - begin, FAN)).astype(STORED_ROW)
        level += 1


def pack_columns(level: int, number: int, rows: np.ndarray) -> dict[str, Any]:
    """Columns of a Pack."""
    return {
        "level": level, "number": number, "first_step": int(rows["first"][0]), "last_step": int(rows["step"][-1]),
        "full": len(rows) == PACK_ROWS, "data": rows.tobytes(),
    }  # fmt: skip
