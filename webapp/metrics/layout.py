"""How points lie in the database: columns of narrow differences, and rollups over them. Pure NumPy; no database.

A block holds some 256 points as four columns: the differences of step, time and offset in the fewest bytes that hold them,
and the values as float32 where that loses nothing. A rollup row stands for neighbouring steps; rows are merged 16 at a time,
level by level, so a chart of any number of points reads some thousands of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

POINT = np.dtype([("step", "<i8"), ("time", "<f8"), ("value", "<f8"), ("offset", "<i8")])
"""A point. `offset` is the byte of the spool where its line begins: later lines win, and live charts go on from it."""

ROW = np.dtype([
    ("first", "<i8"), ("step", "<i8"), ("time", "<f8"), ("mean", "<f8"), ("low", "<f8"), ("high", "<f8"), ("finite", "<i8"),
    ("count", "<i8"), ("kinds", "<i8"),
])  # fmt: skip
"""Some points in a row, or one. `mean`, `low`, `high` are NaN without a finite value; bit k of `kinds`: some value has
PointKind k; `first` is the first point's step, `step` and `time` are the last one's."""

STORED_ROW = np.dtype([
    ("first", "<i8"), ("step", "<i8"), ("time", "<f8"), ("mean", "<f8"), ("low", "<f8"), ("high", "<f8"), ("finite", "<u4"),
    ("count", "<u4"), ("kinds", "u1"),
])  # fmt: skip

FAN = 16
"""Rows of one level that the next level has one row for."""

_HEADER = struct.Struct("<BBBBBxxxIqqq")
"""Version; bytes of a difference of step, of time, of offset, and of a value; points; the first step, time and offset."""
_WIDTH_AT = 4
_VERSION = 1
_WIDTHS = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}


def encode(lines: np.ndarray, values: np.ndarray, starts: Sequence[int]) -> list[list[bytes]]:
    """Points of several series on the same lines, cut at `starts`: for each part the bytes of each series.

    `lines` are POINT records, whose values don't matter; `values` has the shape (series, lines). A point takes 10 to 32 bytes,
    about 15 of what a trainer reports. Nothing is rounded.
    """
    with np.errstate(over="ignore"):
        short = values.astype("<f4")
    fits = np.logical_and.reduceat((short == values) | np.isnan(values), starts, axis=1).T.tolist()
    parts = []
    for start, stop, fit in zip(starts, [*starts[1:], len(lines)], fits, strict=True):
        place = _encode_place(lines[start:stop])
        narrow, wide = (place[:_WIDTH_AT] + bytes([width]) + place[_WIDTH_AT + 1 :] for width in (4, 8))
        parts.append([
            narrow + short[row, start:stop].tobytes() if fit[row] else wide + values[row, start:stop].tobytes()
            for row in range(len(values))
        ])  # fmt: skip
    return parts


def split(data: bytes) -> tuple[bytes, np.ndarray]:
    """What a block or tail says of its lines, which is equal for all series on the same lines; and its values."""
    if not data:
        return b"", np.empty(0)
    _, *widths, value_width, count, _, _, _ = _HEADER.unpack_from(data)
    end = _HEADER.size + sum(widths) * (count - 1)
    return data[:_WIDTH_AT] + b"\0" + data[_WIDTH_AT + 1 : end], np.frombuffer(data, f"<f{value_width}", count, end)


def decode_lines(data: bytes | memoryview) -> np.ndarray:
    """POINT records without their values, of a whole block or of what `split` leaves.

    Raises ValueError on a version that is not known here.
    """
    if not len(data):
        return np.empty(0, POINT)
    version, *widths, _, count, step, time, offset = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"a block has version {version}; {_VERSION} is understood")
    points = np.empty(count, POINT)
    at = _HEADER.size
    for name, width, first in zip(("step", "time", "offset"), widths, (step, time, offset), strict=True):
        column = np.empty(count, "<i8")
        column[0] = first
        column[1:] = np.frombuffer(data, _WIDTHS[width], count - 1, at)
        np.cumsum(column, out=column)
        points[name] = column.view("<f8") if name == "time" else column
        at += width * (count - 1)
    return points


def decode(data: bytes | memoryview) -> np.ndarray:
    """POINT records of a block or tail. Raises ValueError on a version that is not known here."""
    points = decode_lines(data)
    if len(points):
        width = data[_WIDTH_AT]
        points["value"] = np.frombuffer(data, f"<f{width}", len(points), len(data) - width * len(points))
    return points


def _encode_place(lines: np.ndarray) -> bytes:
    """A block up to its values, whose width is left 0. Differences wrap at 64 bits, and so does the sum that undoes them."""
    columns = [np.ascontiguousarray(lines[name]).view("<i8") for name in ("step", "time", "offset")]
    parts = [_narrow(column[1:] - column[:-1]) for column in columns]
    widths = (part.itemsize for part in parts)
    header = _HEADER.pack(_VERSION, *widths, 0, len(lines), *(int(column[0]) for column in columns))
    return b"".join([header, *(part.tobytes() for part in parts)])


def _narrow(differences: np.ndarray) -> np.ndarray:
    low, high = (int(differences.min()), int(differences.max())) if len(differences) else (0, 0)
    width = next(width for width in _WIDTHS if -(2 ** (8 * width - 1)) <= low and high < 2 ** (8 * width - 1))
    return differences.astype(_WIDTHS[width])


def as_rows(points: np.ndarray) -> np.ndarray:
    """Each point as a row of its own."""
    return table_rows(points, points["value"])


def table_rows(lines: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each value as a row of its own, of the shape of `values`: (lines) or (series, lines)."""
    rows = np.zeros(values.shape, ROW)
    finite = np.isfinite(values)
    rows["first"] = rows["step"] = lines["step"]
    rows["time"], rows["count"], rows["finite"] = lines["time"], 1, finite
    if finite.all():
        rows["mean"] = rows["low"] = rows["high"] = values
        rows["kinds"] = 1
        return rows
    rows["mean"] = rows["low"] = rows["high"] = np.where(finite, values, np.nan)
    rows["kinds"] = np.where(finite, 1, np.where(np.isnan(values), 2, np.where(values > 0, 4, 8)))
    return rows


def newest(rows: np.ndarray) -> np.ndarray:
    """Sorted by step; of rows (or points) with equal steps the one that comes last in the input."""
    chosen = newest_of(rows["step"])
    return rows if chosen is None else rows[chosen]


def newest_of(steps: np.ndarray) -> np.ndarray | None:
    """Indices of what `newest` keeps; None when that is everything as it is."""
    if len(steps) < 2 or (steps[1:] > steps[:-1]).all():
        return None
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    return order[np.append(ordered[1:] != ordered[:-1], True)]


def merge(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """One row for the rows from each of `starts` up to the next, along the last axis. Lowest and highest values survive."""
    if not len(starts):
        return np.empty((*rows.shape[:-1], 0), ROW)
    ends = np.append(starts[1:], rows.shape[-1])
    merged = rows[..., ends - 1].astype(ROW)
    merged["first"] = rows["first"][..., starts]
    merged["low"] = np.fmin.reduceat(rows["low"], starts, axis=-1)
    merged["high"] = np.fmax.reduceat(rows["high"], starts, axis=-1)
    merged["count"] = np.add.reduceat(rows["count"], starts, axis=-1)
    merged["finite"] = np.add.reduceat(rows["finite"], starts, axis=-1)
    merged["kinds"] = np.bitwise_or.reduceat(rows["kinds"], starts, axis=-1)
    # Sums of large values overflow, so shares are summed.
    share = rows["finite"] / np.repeat(np.maximum(merged["finite"], 1), ends - starts, axis=-1)
    mean = np.add.reduceat(np.where(rows["finite"] > 0, rows["mean"], 0.0) * share, starts, axis=-1)
    merged["mean"] = np.where(merged["finite"] > 0, mean, np.nan)
    return merged


def bucketed(rows: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` rows: neighbours are merged in buckets of 2^k steps, aligned at 0, so that a refresh moves none.

    Lowest and highest values survive, so that no spike is ever hidden.
    """
    if len(rows) <= limit:
        return rows
    steps = rows["step"]
    shift = (
        max(len(rows) // limit, 1).bit_length() - 1
    )  # smaller can't do: a bucket of 2^k steps holds 2^k rows at most
    while True:
        bucket = steps >> shift
        starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
        if len(starts) <= limit:
            return merge(rows, starts)
        shift += 1
