"""How points lie in the database: columns of narrow differences, and rollups over them. Pure NumPy; no database.

A block holds some 256 points as four columns: the differences of step, time and offset in the fewest bytes that hold them,
and the values as float32 where that loses nothing. A rollup row stands for neighbouring steps; rows are merged 16 at a time,
level by level, so a chart of any number of points reads some thousands of them.
"""

from __future__ import annotations

import struct

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
_VERSION = 1
_WIDTHS = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}


def encode(points: np.ndarray) -> bytes:
    """POINT records in 10 to 32 bytes each; about 15 for what a trainer reports. Nothing is rounded."""
    if not len(points):
        return b""
    columns = [np.ascontiguousarray(points["step"]), _bits(points["time"]), np.ascontiguousarray(points["offset"])]
    # Differences wrap at 64 bits, and so does the sum that undoes them.
    parts = [_narrow(np.diff(column)) for column in columns]
    values = np.ascontiguousarray(points["value"])
    with np.errstate(over="ignore"):
        short = values.astype("<f4")
    if not np.array_equal(short.astype("<f8"), values, equal_nan=True):
        short = values
    header = _HEADER.pack(
        _VERSION, *(part.itemsize for part in parts), short.itemsize, len(points), *(int(column[0]) for column in columns)
    )  # fmt: skip
    return b"".join([header, *(part.tobytes() for part in parts), short.tobytes()])


def decode(data: bytes | memoryview) -> np.ndarray:
    """Inverse of `encode`. Raises ValueError on a version that is not known here."""
    if not len(data):
        return np.empty(0, POINT)
    version, *widths, value_width, count, step, time, offset = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"a block has version {version}; {_VERSION} is understood")
    points = np.empty(count, POINT)
    at = _HEADER.size
    columns = []
    for width, first in zip(widths, (step, time, offset), strict=True):
        column = np.empty(count, "<i8")
        column[0] = first
        column[1:] = np.frombuffer(data, _WIDTHS[width], count - 1, at)
        columns.append(np.cumsum(column, out=column))
        at += width * (count - 1)
    points["step"], points["time"], points["offset"] = columns[0], columns[1].view("<f8"), columns[2]
    points["value"] = np.frombuffer(data, f"<f{value_width}", count, at)
    return points


def _bits(times: np.ndarray) -> np.ndarray:
    """Times of one run differ little, and so do their bits, read as integers."""
    return np.ascontiguousarray(times).view("<i8")


def _narrow(differences: np.ndarray) -> np.ndarray:
    low, high = (int(differences.min()), int(differences.max())) if len(differences) else (0, 0)
    width = next(width for width in _WIDTHS if -(2 ** (8 * width - 1)) <= low and high < 2 ** (8 * width - 1))
    return differences.astype(_WIDTHS[width])


def as_rows(points: np.ndarray) -> np.ndarray:
    """Each point as a row of its own."""
    rows = np.zeros(len(points), ROW)
    value = points["value"]
    finite = np.isfinite(value)
    rows["first"] = rows["step"] = points["step"]
    rows["time"], rows["count"], rows["finite"] = points["time"], 1, finite
    if finite.all():
        rows["mean"] = rows["low"] = rows["high"] = value
        rows["kinds"] = 1
        return rows
    rows["mean"] = rows["low"] = rows["high"] = np.where(finite, value, np.nan)
    rows["kinds"] = np.where(finite, 1, np.where(np.isnan(value), 2, np.where(value > 0, 4, 8)))
    return rows


def newest(rows: np.ndarray) -> np.ndarray:
    """Sorted by step; of rows (or points) with equal steps the one that comes last in the input."""
    steps = rows["step"]
    if len(rows) < 2 or (np.diff(steps) > 0).all():
        return rows
    rows = rows[np.argsort(steps, kind="stable")]
    return rows[np.append(rows["step"][1:] != rows["step"][:-1], True)]


def merge(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """One row for the rows from each of `starts` up to the next. Lowest and highest values survive."""
    if not len(starts):
        return np.empty(0, ROW)
    ends = np.append(starts[1:], len(rows))
    merged = rows[ends - 1].astype(ROW)
    merged["first"] = rows["first"][starts]
    merged["low"] = np.fmin.reduceat(rows["low"], starts)
    merged["high"] = np.fmax.reduceat(rows["high"], starts)
    merged["count"] = np.add.reduceat(rows["count"], starts)
    merged["finite"] = np.add.reduceat(rows["finite"], starts)
    merged["kinds"] = np.bitwise_or.reduceat(rows["kinds"], starts)
    share = rows["finite"] / np.repeat(np.maximum(merged["finite"], 1), ends - starts)  # sums of large values overflow
    mean = np.add.reduceat(np.where(rows["finite"] > 0, rows["mean"], 0.0) * share, starts)
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
