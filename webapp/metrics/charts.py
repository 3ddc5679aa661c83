"""What a chart asks for: curves of one run in at most N buckets on a chosen axis, and later only what is new."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from django.db.models import Q, Subquery

from trainer_core.metrics import STAGES, describe
from webapp.metrics import reading
from webapp.metrics.layout import as_rows, bucketed, newest
from webapp.metrics.models import PointKind, Series
from webapp.runs.models import Event, Run

Axis = Literal["step", "time", "tokens"]
MAX_BUCKETS = 2000
TOKENS = "batch/forwarded_tokens_per_step"
_MARKS = 200

_KIND_NAMES = {kind: kind.label for kind in PointKind if kind != PointKind.FINITE}


class BadCursor(ValueError):
    """A cursor that was not made here; the text is a sentence."""


class Scale:
    """Places steps and times of a run on an axis.

    step: as they are. time: Unix seconds. tokens: tokens forwarded up to and including the step.
    """

    def __init__(self, axis: Axis, run_parts: Sequence[reading.Part]) -> None:
        self.axis = axis
        self._steps, self._tokens = np.empty(0, "<i8"), np.empty(0)
        if axis == "tokens":
            found = reading.traces(run_parts, [TOKENS])[TOKENS]
            curve = next((trace.rows for trace in found if trace.attempt is None), None)
            if curve is not None:
                self._steps, self._tokens = curve["step"], np.cumsum(np.nan_to_num(curve["mean"]) * curve["count"])

    def place(self, steps: np.ndarray, times: np.ndarray) -> np.ndarray:
        if self.axis == "step":
            return steps
        if self.axis == "time":
            return times
        if not len(self._steps):
            return np.zeros(len(steps))
        return np.append(0.0, self._tokens)[np.searchsorted(self._steps, steps, side="right")]

    def step_range(self, low: float | None, high: float | None) -> tuple[int | None, int | None]:
        """A range of steps that covers a range of this axis; open where that isn't known beforehand."""
        if self.axis == "step":
            return _ceil(low), _floor(high)
        if self.axis == "time" or not len(self._steps):
            return None, None
        first = None if low is None else self._at(int(np.searchsorted(self._tokens, low)))
        last = None if high is None else self._at(int(np.searchsorted(self._tokens, high, side="right")) - 1)
        return first, last

    def _at(self, index: int) -> int:
        return int(self._steps[min(max(index, 0), len(self._steps) - 1)])


def chart(
    run: Run, metrics: Sequence[str], axis: Axis = "step", low: float | None = None, high: float | None = None,
    buckets: int = MAX_BUCKETS,
) -> dict[str, Any]:  # fmt: skip
    """Curves of `metrics` between `low` and `high` of the axis, each in at most `buckets` rows, with a cursor for `delta`."""
    cursor = cursor_of(run)
    run_parts = reading.parts(run)
    scale = Scale(axis, run_parts)
    first, last = scale.step_range(low, high)
    buckets = min(buckets, MAX_BUCKETS)
    zoomed_in_time = axis == "time" and (low is not None or high is not None)
    if zoomed_in_time:
        first, last = _steps_of_times(run_parts, metrics, _or(low, -np.inf), _or(high, np.inf))
    series = []
    for traces in reading.traces(run_parts, metrics, first, last, buckets).values():
        for trace in traces:
            rows = trace.rows
            if zoomed_in_time:
                rows = rows[(rows["time"] >= _or(low, -np.inf)) & (rows["time"] <= _or(high, np.inf))]
            if len(rows):
                series.append(_as_json(trace, bucketed(rows, buckets), scale))
    return {
        "run": str(run.pk), "name": run.name, "state": run.state, "live": run.is_live, "cursor": cursor, "axis": axis,
        "series": series, "attempts": _attempts(run_parts, scale), "events": _events(run, scale),
        "metrics": {metric: describe_metric(metric) for metric in metrics},
    }  # fmt: skip


def _steps_of_times(
    run_parts: Sequence[reading.Part], metrics: Sequence[str], low: float, high: float
) -> tuple[int | None, int | None]:
    """A range of steps that covers a range of times, so that a zoom in time shows single points too."""
    first: list[int] = []
    last: list[int] = []
    for traces in reading.traces(run_parts, metrics).values():
        for trace in traces:
            times = trace.rows["time"]
            touched = trace.rows[(times >= low) & (np.append(-np.inf, times[:-1]) <= high)]
            if len(touched):
                first.append(int(touched["first"].min()))
                last.append(int(touched["step"].max()))
    return (min(first), max(last)) if first else (None, None)


def delta(run: Run, metrics: Sequence[str], axis: Axis, cursor: str) -> dict[str, Any]:
    """Points written since `cursor`, or `reset` when the chart must be asked for anew since another attempt has begun.

    A point may come twice; it is the same point then. Raises BadCursor.
    """
    number, offset, event_id = _parse_cursor(cursor)
    new_cursor = cursor_of(run)
    answer: dict[str, Any] = {
        "run": str(run.pk), "state": run.state, "live": run.is_live, "cursor": new_cursor, "axis": axis, "series": [],
        "events": [], "reset": _parse_cursor(new_cursor)[0] != number,
    }  # fmt: skip
    if answer["reset"] or new_cursor == cursor:
        return answer
    scale = Scale(axis, reading.parts(run) if axis == "tokens" else [])
    if _parse_cursor(new_cursor)[2] != event_id:
        answer["events"] = _events(run, scale, after=event_id)
    fresh = Series.objects.filter(run=run, attempt__number=number, name__in=metrics, last_offset__gte=offset)
    for series in fresh:
        if series.dropped_points:
            return {**answer, "series": [], "reset": True}
        rows = newest(as_rows(reading.points_of(series, offset)))
        trace = reading.Trace(series.name, None, rows)
        if len(rows) > MAX_BUCKETS:  # so much is new that a fresh chart is smaller
            return {**answer, "series": [], "reset": True}
        answer["series"].append(_as_json(trace, rows, scale))
    return answer


def cursor_of(run: Run) -> str:
    """Where the run's reports stand: number of its newest attempt, stored bytes of its spool, id of its newest event."""
    event = run.events.order_by("-id").values("pk")[:1]
    newest = run.attempts.order_by("-number").values_list("number", "spool_offset", Subquery(event)).first()
    if newest is None:
        return f"0.0.{run.events.order_by('-id').values_list('pk', flat=True).first() or 0}"
    return ".".join(str(part or 0) for part in newest)


def catalog(run: Run) -> list[dict[str, Any]]:
    """Every metric of the run, with stage, unit and help, by stage in the table's order; own metrics come last."""
    rows: dict[str, dict[str, Any]] = {}
    found = run.series.filter(points__gt=0).order_by("attempt__number").defer("tail")
    for series in found:
        earlier = rows.get(series.name, {"points": 0, "dropped_points": 0})
        rows[series.name] = {
            "name": series.name, "points": earlier["points"] + series.points,
            "dropped_points": earlier["dropped_points"] + series.dropped_points, "last_step": series.last_step,
            "last_value": series.last_value, "last_kind": PointKind(series.last_kind).label, **describe_metric(series.name),
        }  # fmt: skip
    return sorted(rows.values(), key=lambda row: (_stage_order(row["stage"]), row["name"]))


def describe_metric(name: str) -> dict[str, str]:
    metric = describe(name)
    if metric is None:
        return {"stage": "other", "unit": "", "help": ""}
    return {"stage": metric.stage, "unit": metric.unit, "help": metric.help}


def _stage_order(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def _as_json(trace: reading.Trace, rows: np.ndarray, scale: Scale) -> dict[str, Any]:
    """Columns of a trace. `low`, `high`, `count` come only where some row stands for several points."""
    several = bool((rows["count"] > 1).any())
    odd = np.flatnonzero(rows["kinds"] & ~1)
    answer: dict[str, Any] = {
        "metric": trace.metric, "attempt": trace.attempt, "x": scale.place(rows["step"], rows["time"]),
        "step": np.ascontiguousarray(rows["step"]), "y": _short(rows["mean"]),
        "points": int(rows["count"].sum()),
        "odd": [
            [int(index), [name for kind, name in _KIND_NAMES.items() if int(rows["kinds"][index]) >> kind & 1]]
            for index in odd
        ],
    }  # fmt: skip
    answer["x"] = np.round(answer["x"], 3) if scale.axis == "time" else np.ascontiguousarray(answer["x"])
    if several:
        answer |= {
            "low": _short(rows["low"]),
            "high": _short(rows["high"]),
            "count": np.ascontiguousarray(rows["count"]),
        }
    return answer


def _short(values: np.ndarray) -> np.ndarray:
    """As float32, which halves the answer's size and is finer than any screen, unless it would overflow."""
    largest = np.nanmax(np.abs(values), initial=0.0)
    return values.astype("<f4") if largest < float(np.finfo("<f4").max) else np.ascontiguousarray(values)


def _attempts(run_parts: Sequence[reading.Part], scale: Scale) -> list[dict[str, Any]]:
    answer = []
    for part in run_parts:
        moment = (part.attempt.started_at or part.attempt.created_at).timestamp()
        x = scale.place(np.array([part.start]), np.array([moment]))[0]
        answer.append({"number": part.attempt.number, "step": part.start, "x": x, "state": part.attempt.state})
    return answer


def _events(run: Run, scale: Scale, after: int = 0) -> list[dict[str, Any]]:
    """Newest checkpoints, warnings and errors with an id above `after`, as marks on the axis."""
    wanted = run.events.filter(
        Q(level__in=(Event.Level.WARNING, Event.Level.ERROR)) | Q(name="checkpoint"), pk__gt=after
    )
    if scale.axis != "time":
        wanted = wanted.exclude(step=None)
    events = list(wanted.order_by("-id")[:_MARKS])
    steps = np.array([event.step or 0 for event in events], "<i8")
    times = np.array([event.created_at.timestamp() for event in events], "<f8")
    return [
        {"id": event.pk, "x": x, "step": event.step, "level": event.level, "name": event.name, "text": event.text}
        for x, event in zip(scale.place(steps, times).tolist(), events, strict=True)
    ]


def _parse_cursor(cursor: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"\d{1,9}\.\d{1,18}\.\d{1,18}", cursor, re.ASCII):
        raise BadCursor(f"The cursor is {cursor!r:.60}; pass on the one that the last answer gave.")
    number, offset, event_id = (int(part) for part in cursor.split("."))
    return number, offset, event_id


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _ceil(value: float | None) -> int | None:
    return None if value is None else _clamped(np.ceil(value))


def _floor(value: float | None) -> int | None:
    return None if value is None else _clamped(np.floor(value))


def _clamped(value: float) -> int:
    return int(min(max(value, -(2.0**62)), 2.0**62))
