"""Complete exports of points, of one run or several, streamed: memory does not grow with the runs."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal
from uuid import UUID

import numpy as np
import orjson
from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse

from trainer_core.spool import encode_number
from webapp.metrics import reading
from webapp.metrics.models import Series
from webapp.runs.models import Run

Format = Literal["csv", "jsonl", "parquet"]
COLUMNS = ("metric", "attempt", "step", "time", "value", "superseded", "points")
"""`points` is 1, or how many points the value is the mean of, where retention has dropped them."""

_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/x-ndjson",
    "parquet": "application/vnd.apache.parquet",
}

Piece = tuple[Series, np.ndarray, np.ndarray, np.ndarray]
"""A series, some of its points, for each whether a newer attempt superseded it, and how many points it stands for."""


def series_of(run: Run, metrics: Sequence[str]) -> list[Series]:
    """The run's series of these names, or all, by name and attempt."""
    found = run.series.filter(points__gt=0).select_related("attempt").order_by("name", "attempt__number")
    return list(found.filter(name__in=metrics) if metrics else found)


def response(run: Run, series: Sequence[Series], format_: Format) -> StreamingHttpResponse:
    """All points of the series as a file to download, in the order they were written."""
    writers = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet}
    return _file(writers[format_](_pieces(series, _ends(run))), f"run-{str(run.pk)[:8]}-metrics", format_)


def response_of_several(runs: Sequence[Run], metrics: Sequence[str]) -> StreamingHttpResponse:
    """All points of these metrics of several runs as CSV; id and name of the run come before the other columns."""
    pieces = (piece for run in runs for piece in _pieces(series_of(run, metrics), _ends(run)))
    return _file(_csv(pieces, {run.pk: run.name for run in runs}), "runs-compared", "csv")


def _file(body: Iterator[bytes], name: str, format_: Format) -> StreamingHttpResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}.{format_}"', "X-Content-Type-Options": "nosniff"}
    return StreamingHttpResponse(_in_threads(body), content_type=_TYPES[format_], headers=headers)


def _ends(run: Run) -> dict[UUID, int | None]:
    """By attempt, the step from which a newer one superseded it."""
    return {part.attempt.pk: part.end for part in reading.parts(run)}


def _pieces(series: Sequence[Series], ends: dict[UUID, int | None]) -> Iterator[Piece]:
    for item in series:
        end = ends.get(item.attempt_id)
        for points, counts in reading.stream(item):
            yield item, points, np.zeros(len(points), bool) if end is None else points["step"] >= end, counts


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same pieces; each is made in a thread, where the database may be asked."""
    make: Any = sync_to_async(next)
    while (piece := await make(pieces, None)) is not None:
        yield piece


def _csv(pieces: Iterator[Piece], names: Mapping[UUID, str] | None = None) -> Iterator[bytes]:
    """With `names` of runs, by id, each row begins with the id and name of its run."""
    yield (",".join((*(("run", "name") if names else ()), *COLUMNS)) + "\n").encode()
    for series, points, superseded, counts in pieces:
        run = (str(series.run_id), names[series.run_id]) if names else ()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows(
            (*run, series.name, series.attempt.number, step, time, value, int(old), count)
            for (step, time, value, _), old, count in zip(
                points.tolist(), superseded.tolist(), counts.tolist(), strict=True
            )
        )
        yield text.getvalue().encode()


def _jsonl(pieces: Iterator[Piece]) -> Iterator[bytes]:
    for series, points, superseded, counts in pieces:
        yield b"".join(
            orjson.dumps(
                {
                    "metric": series.name, "attempt": series.attempt.number, "step": step, "time": time,
                    "value": encode_number(value), "superseded": old, "points": count,
                }
            ) + b"\n"
            for (step, time, value, _), old, count in zip(
                points.tolist(), superseded.tolist(), counts.tolist(), strict=True
            )
        )  # fmt: skip


def _parquet(pieces: Iterator[Piece]) -> Iterator[bytes]:
    import pyarrow as pa  # half a second, and only exports need it
    import pyarrow.parquet as pq

    types = (pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.float64(), pa.bool_(), pa.int64())
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    sink = io.BytesIO()
    with pq.ParquetWriter(_Drained(sink), schema, compression="zstd") as writer:
        for series, points, superseded, counts in pieces:
            size = len(points)
            columns = [
                pa.array([series.name] * size), pa.array(np.full(size, series.attempt.number, "<i4")),
                pa.array(np.ascontiguousarray(points["step"])), pa.array(np.ascontiguousarray(points["time"])),
                pa.array(np.ascontiguousarray(points["value"])), pa.array(superseded), pa.array(counts),
            ]  # fmt: skip
            writer.write_table(pa.table(columns, schema=schema))
            yield _take(sink)
    yield _take(sink)


class _Drained(io.RawIOBase):
    """A file to write to whose position goes on while its content is taken away."""

    def __init__(self, sink: io.BytesIO) -> None:
        self._sink, self._position = sink, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: object) -> int:
        size = self._sink.write(data)  # type: ignore[arg-type]
        self._position += size
        return size


def _take(sink: io.BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
