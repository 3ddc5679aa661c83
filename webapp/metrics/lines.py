"""Reads a piece of a spool file (the format is in trainer_core/spool.py) into columns. Pure: no database."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from trainer_core.spool import VERSION

MAX_NAME = 250
MAX_DEPTH = 50
MAX_LINE_BYTES = 16 * 2**20
"""A line without an end that is longer than this is given up; a reader must offer pieces at least this large."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LEVELS = ("info", "warning", "error")
_INT64 = 2**63
_FLOAT = frozenset({float})


@dataclass
class Column:
    """Values of one metric, and for each the index of its line in `Parsed.steps`, which grows."""

    lines: np.ndarray
    values: np.ndarray


@dataclass
class _Shape:
    """Lines that hold the same names in the same order, as those of a trainer do: then a line is one row of a table."""

    names: tuple[str, ...]
    lines: list[int] = field(default_factory=list)
    rows: list[Iterable[float]] = field(default_factory=list)


@dataclass
class Parsed:
    """What a piece held. `consumed` bytes are done with; the rest is a line still being written.

    `steps`, `times` and `offsets` have one entry for each metrics line, in order. `problems` are (byte, sentence).
    """

    consumed: int = 0
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    trained: list[dict[str, Any]] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    shapes: dict[tuple[str, ...], _Shape] = field(default_factory=dict)
    last_shape: _Shape | None = None


def parse(chunk: bytes, offset: int) -> Parsed:
    """Read the whole lines of `chunk`, which begins at byte `offset` of its file.

    Never raises on content: what can't be understood is listed under `problems` and skipped, so that one bad line can
    neither stop nor hide the others. Each event carries its line's offset as `at`, for the order among points.
    """
    parsed = Parsed(consumed=chunk.rfind(b"\n") + 1)
    if parsed.consumed == 0 and len(chunk) >= MAX_LINE_BYTES:
        parsed.problems.append((offset, f"a line is longer than {MAX_LINE_BYTES} bytes"))
        parsed.consumed = len(chunk)
        return parsed
    start = 0
    while start < parsed.consumed:
        stop = chunk.index(b"\n", start)
        if line := chunk[start:stop].strip():
            _read_line(line, offset + start, parsed)
        start = stop + 1
    parsed.columns = _columns(parsed.shapes.values())
    return parsed


def _columns(shapes: Iterable[_Shape]) -> dict[str, Column]:
    found: dict[str, list[Column]] = {}
    for shape in shapes:
        lines, table = np.array(shape.lines, "<i8"), np.array(shape.rows, "<f8").T.copy()
        for name, values in zip(shape.names, table, strict=True):
            found.setdefault(name, []).append(Column(lines, values))
    return {name: parts[0] if len(parts) == 1 else _in_order(parts) for name, parts in found.items()}


def _in_order(parts: list[Column]) -> Column:
    lines, values = np.concatenate([part.lines for part in parts]), np.concatenate([part.values for part in parts])
    order = np.argsort(lines)
    return Column(lines[order], values[order])


def _read_line(line: bytes, at: int, parsed: Parsed) -> None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        parsed.problems.append((at, f"not JSON: {error}"))
        return
    problem = _header_problem(record)
    if problem:
        parsed.problems.append((at, problem))
    elif record["kind"] == "metrics":
        _read_metrics(record, at, parsed)
    elif record["kind"] == "event":
        _read_event(record, at, parsed)
    elif record["kind"] == "rollout":
        _read_rollout(record, at, parsed)
    elif record["kind"] == "trained":
        _read_trained(record, at, parsed)
    else:
        parsed.problems.append((at, f"kind is {record['kind']!r:.80}; metrics, event, rollout and trained are known"))


def _header_problem(record: Any) -> str | None:
    if not isinstance(record, dict):
        return f"found {type(record).__name__}; an object is expected"
    if record.get("v") != VERSION:
        return f"version is {record.get('v')!r:.80}; {VERSION} is understood"
    step, time = record.get("step"), record.get("t")
    if type(step) is not int or not -_INT64 <= step < _INT64:
        return f"step is {step!r:.80}; a 64-bit integer is expected"
    if type(time) not in (int, float) or not 0 <= time < 1e11:  # type: ignore[operator]
        return f"t is {time!r:.80}; Unix seconds are expected"
    if not isinstance(record.get("kind"), str):
        return f"kind is {record.get('kind')!r:.80}; a text is expected"
    return None


def _read_metrics(record: dict[str, Any], at: int, parsed: Parsed) -> None:
    values = record.get("values")
    if not isinstance(values, dict):
        parsed.problems.append((at, f"values is {type(values).__name__}; an object of numbers is expected"))
        return
    line = len(parsed.steps)
    parsed.steps.append(record["step"])
    parsed.times.append(float(record["t"]))
    parsed.offsets.append(at)
    names = tuple(values)
    shape = parsed.last_shape
    if shape is None or names != shape.names:  # hashing the names of each line would cost as much as all the rest
        shape = parsed.shapes.get(names)
    if shape is None or _FLOAT.union(map(type, values.values())) != _FLOAT:
        values = _checked(values, at, parsed)
        names = tuple(values)
        if not names:
            return
        shape = parsed.shapes.setdefault(names, _Shape(names))
    parsed.last_shape = shape
    shape.lines.append(line)
    shape.rows.append(tuple(values.values()))


def _checked(values: dict[str, Any], at: int, parsed: Parsed) -> dict[str, float]:
    """What can be stored of a line's values; the rest is listed under `problems`."""
    good: dict[str, float] = {}
    for name, value in values.items():
        number = value if type(value) is float else _number(value)
        if number is None:
            reason = f"{name:.80} is {value!r:.80}; a number, 'nan', 'inf' or '-inf' is expected"
            parsed.problems.append((at, reason))
        elif not 0 < len(name) <= MAX_NAME or not name.isprintable():
            reason = f"{name!r:.80} is no metric name; up to {MAX_NAME} printable characters are allowed"
            parsed.problems.append((at, reason))
        else:
            good[name] = number
    return good


def _number(value: Any) -> float | None:
    if type(value) is int:
        return float(value)  # JSON integers that orjson accepts fit a float
    return _NOT_FINITE.get(value) if isinstance(value, str) else None


def _read_event(record: dict[str, Any], at: int, parsed: Parsed) -> None:
    name, text, data = record.get("name"), record.get("text"), record.get("data", {})
    if not isinstance(name, str) or not 0 < len(name) <= 80 or not isinstance(text, str) or not isinstance(data, dict):
        parsed.problems.append((at, "an event needs a name of up to 80 characters, a text, and an object as data"))
        return
    level = record.get("level")
    if level not in _LEVELS:
        parsed.problems.append((at, f"level is {level!r:.80}; {', '.join(_LEVELS)} are known"))
        return
    if name == "checkpoint" and record["step"] < 0:
        parsed.problems.append((at, f"a checkpoint has step {record['step']}; 0 or more is expected"))
        return
    try:
        parsed.events.append({"data": {}, **_storable(record), "at": at})
    except ValueError as error:
        parsed.problems.append((at, str(error)))


def _read_rollout(record: dict[str, Any], at: int, parsed: Parsed) -> None:
    rollout = record.get("rollout")
    if not isinstance(rollout, dict):
        parsed.problems.append((at, f"rollout is {type(rollout).__name__}; an object is expected"))
        return
    group_id, row_index = rollout.get("group_id"), rollout.get("row_index")
    if (
        not isinstance(group_id, str) or not 0 < len(group_id) <= 64
        or type(row_index) is not int or not -_INT64 <= row_index < _INT64
    ):  # fmt: skip
        parsed.problems.append(
            (at, "a rollout needs group_id, a text of up to 64 characters, and row_index, an integer")
        )
        return
    try:
        parsed.rollouts.append({**_storable(record), "at": at})
    except ValueError as error:
        parsed.problems.append((at, str(error)))


def _read_trained(record: dict[str, Any], at: int, parsed: Parsed) -> None:
    trained = record.get("trained")
    if not isinstance(trained, dict) or not isinstance(trained.get("group_id"), str):
        parsed.problems.append((at, "trained needs to be an object with a group_id, a text"))
        return
    staleness, rollouts = trained.get("staleness"), trained.get("rollouts")
    if type(staleness) is not int or not -_INT64 <= staleness < _INT64 or not isinstance(rollouts, list):
        parsed.problems.append((at, "trained needs staleness, an integer, and rollouts, a list"))
        return
    if not all(map(_has_tokens, rollouts)):
        parsed.problems.append(
            (
                at,
                "a rollout of trained needs its id, its sequence, and one letter of its mask and one text for each token",
            )
        )
        return
    try:
        parsed.trained.append({**_storable(record), "at": at})
    except ValueError as error:
        parsed.problems.append((at, str(error)))


def _has_tokens(rollout: Any) -> bool:
    """Whether the values of a rollout's tokens fit one another."""
    if not isinstance(rollout, dict) or not isinstance(rollout.get("rollout_id"), str):
        return False
    sequence, text, mask = rollout.get("sequence"), rollout.get("text"), rollout.get("mask")
    if (
        type(sequence) is not int
        or not 0 <= sequence < 2**31
        or not isinstance(text, list)
        or not isinstance(mask, str)
    ):
        return False
    if type(rollout.get("left_out")) is not int or type(rollout.get("advantage")) not in (int, float):
        return False
    trained = len(mask) - mask.count(".")
    columns = [rollout.get(name) for name in ("log_probs", "ratio", "entropy")]
    return len(text) == len(mask) and all(map(_is_text, text)) and all(_numbers(column, trained) for column in columns)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _numbers(column: Any, count: int) -> bool:
    """Whether these are `count` numbers; JSON has none for what is not finite, and a trainer then writes null."""
    return (
        isinstance(column, list) and len(column) == count and all(type(v) in (int, float) or v is None for v in column)
    )


def _storable(value: Any, depth: int = 0) -> Any:
    """The same JSON value with NUL characters shown as U+FFFD: PostgreSQL stores none, and a model may well write one.

    Raises ValueError when it is nested deeper than a database or a reader could be trusted with.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return value.replace("\0", "\ufffd") if "\0" in value else value
    if isinstance(value, dict):
        return {_storable(key): _storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_storable(item, depth + 1) for item in value]
    return value
