"""Reads finished runs of other tools into lines of a spool (trainer_core/spool.py has the format). Standard library only.

Each reader yields runs; a run's points come in the order they were written. What is no number is left out.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from webapp.cli.client import Failure
from webapp.cli.wire import fields, leveldb_records, tf_records

Point = tuple[int, float, dict[str, float]]
"""Step, Unix seconds, values."""


@dataclass
class History:
    """A run from elsewhere."""

    name: str
    source: str
    config: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)


def read(path: Path) -> list[History]:
    """The runs at `path`, told apart by what the files look like. Raises Failure with a sentence."""
    if not path.exists():
        raise Failure(f"{path} does not exist.", 2)
    try:
        found = list(_read(path))
    except (OSError, ValueError, KeyError, TypeError, struct.error, sqlite3.Error) as error:
        raise Failure(f"{path} can't be read: {type(error).__name__}: {error}.") from error
    found = [history for history in found if history.points]
    if not found:
        raise Failure(
            f"{path} holds no run that can be read; a trainer_state.json, a .wandb file, TensorBoard event files, a trackio "
            "database, or a folder with one of them is expected."
        )
    return found


def _read(path: Path) -> Iterator[History]:
    if path.is_dir():
        states = sorted(path.rglob("trainer_state.json"), key=_last_step)
        if states:
            yield trainer_state(states[-1])
        for file in sorted(path.rglob("*.wandb")):
            yield wandb(file)
        for folder in sorted({file.parent for file in path.rglob("*tfevents*")}):
            yield tensorboard(folder)
        for file in sorted(path.rglob("*.db")):
            yield from trackio(file)
    elif path.name.endswith(".json"):
        yield trainer_state(path)
    elif path.suffix == ".wandb":
        yield wandb(path)
    elif "tfevents" in path.name:
        yield tensorboard(path.parent)
    elif path.suffix == ".db":
        yield from trackio(path)


def lines(points: Iterable[Point]) -> Iterator[bytes]:
    """Spool lines of these points."""
    for step, time, values in points:
        shown = {name[:250]: _shown(value) for name, value in values.items() if name}
        if shown:
            record = {"v": 1, "kind": "metrics", "t": time, "step": step, "values": shown}
            yield json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _shown(value: float) -> float | str:
    return float(value) if math.isfinite(value) else ("nan" if math.isnan(value) else ("inf" if value > 0 else "-inf"))


def _numbers(values: dict[str, Any], leave_out: tuple[str, ...] = ()) -> dict[str, float]:
    """The numbers among values, names of nested ones joined by a dot; words for what is not finite are numbers."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if name in leave_out:
            continue
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": number for inner, number in _numbers(value).items()}
        elif isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
            found[name] = float(value)
    return found


# ---- transformers and TRL


def _last_step(path: Path) -> int:
    return int(json.loads(path.read_text()).get("global_step") or 0)


def trainer_state(path: Path) -> History:
    """`log_history` of a transformers or TRL Trainer. It has no times, so those are the file's, a second a step before it."""
    state = json.loads(path.read_text())
    end, last = path.stat().st_mtime, int(state["global_step"])
    history = History(path.parent.parent.name or "trainer", "trainer_state.json")
    settings = (
        "max_steps",
        "num_train_epochs",
        "train_batch_size",
        "logging_steps",
        "save_steps",
        "eval_steps",
        "best_metric",
    )
    history.config = {key: state[key] for key in settings if key in state}
    for entry in state["log_history"]:
        step = int(entry["step"])
        history.points.append((step, max(0.0, end - (last - step)), _numbers(entry, ("step",))))
    return history


# ---- trackio


def trackio(path: Path) -> Iterator[History]:
    """The runs of a project's database."""
    base = sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True)
    try:
        tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "metrics" not in tables:
            return
        columns = {row[1] for row in base.execute("PRAGMA table_info(metrics)")}
        key = "run_id" if "run_id" in columns else "run_name"
        runs: dict[str, History] = {}
        rows = base.execute(f"SELECT {key}, run_name, timestamp, step, metrics FROM metrics ORDER BY id")
        for run, name, moment, step, values in rows:
            history = runs.setdefault(run, History(str(name), "trackio"))
            numbers = _numbers(json.loads(values))
            history.points.append((int(step), datetime.fromisoformat(moment).timestamp(), numbers))
        if "configs" in tables:
            for run, config in base.execute(f"SELECT {key}, config FROM configs"):
                if run in runs:
                    runs[run].config = json.loads(config)
    finally:
        base.close()
    yield from runs.values()


# ---- TensorBoard


def tensorboard(folder: Path) -> History:
    """The scalars of all event files of a folder."""
    history = History(folder.name, "TensorBoard")
    for path in sorted(folder.glob("*tfevents*")):
        for record in tf_records(path.read_bytes()):
            event = fields(record)
            time, step = struct.unpack("<d", event[1][0])[0] if 1 in event else 0.0, int(event.get(2, [0])[0])
            values = {}
            for summary in event.get(5, []):
                for item in fields(summary).get(1, []):
                    value = fields(item)
                    number = _scalar(value)
                    if number is not None and 1 in value:
                        values[value[1][0].decode(errors="replace")] = number
            if values:
                history.points.append((step, time, values))
    return history


def _scalar(value: dict[int, list[Any]]) -> float | None:
    """A Summary.Value's number: its simple_value, or a tensor of one float or double."""
    if 2 in value:
        return float(struct.unpack("<f", value[2][0])[0])
    if 8 not in value:
        return None
    tensor = fields(value[8][0])
    kind = {1: "<f", 2: "<d"}.get(tensor.get(1, [0])[0])
    content = next((tensor[key][0] for key in (4, 5, 6) if key in tensor), b"")
    if kind is None or len(content) != struct.calcsize(kind):
        return None
    return float(struct.unpack(kind, content)[0])


# ---- Weights & Biases


def wandb(path: Path) -> History:
    """A run's transaction log, run-<id>.wandb, as `wandb` leaves it in its folder, synchronised or not."""
    history = History(path.stem.removeprefix("run-"), "wandb")
    for record in leveldb_records(path.read_bytes()):
        message = fields(record)
        for run in message.get(17, []):
            about = fields(run)
            for config in about.get(4, []):
                history.config |= {key: value for key, value in _items(config, 1) if key != "_wandb"}
            if names := about.get(8):
                history.name = names[0].decode(errors="replace")
        for config in message.get(5, []):
            history.config |= {key: value for key, value in _items(config, 1) if key != "_wandb"}
        for row in message.get(2, []):
            values = dict(_items(row, 1))
            step = values.get("_step", fields(fields(row).get(2, [b""])[0]).get(1, [0])[0])
            numbers = _numbers(values, ("_step", "_timestamp", "_runtime"))
            history.points.append((int(step), float(values.get("_timestamp", 0.0)), numbers))
    return history


def _items(message: bytes, number: int) -> Iterator[tuple[str, Any]]:
    """Key and value of repeated {key = 1, nested_key = 2, value_json = 16}."""
    for item in fields(message).get(number, []):
        parts = fields(item)
        key = parts[1][0].decode() if 1 in parts else "/".join(part.decode() for part in parts.get(2, []))
        if key and 16 in parts:
            yield key, json.loads(parts[16][0])
