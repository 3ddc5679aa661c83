"""The spool: how a run tells the world about itself.

One JSON object a line, appended to a file of the run folder. The writer never waits for a reader and never raises into
training; the supervisor ships complete lines onward and remembers the byte offset. Version 1 lines:

    {"v": 1, "kind": "metrics", "t": <unix s>, "step": <int>, "values": {name: number | "nan" | "inf" | "-inf"}}
    {"v": 1, "kind": "event", "t": ..., "step": ..., "level": "info|warning|error", "name": ..., "text": ..., "data": {...}}
    {"v": 1, "kind": "rollout", "t": ..., "step": <weight version>, "rollout": {...}}
    {"v": 1, "kind": "trained", "t": ..., "step": <optimizer step>, "trained": {"group_id", "staleness", "rollouts": [...]}}

A rollout is written by the rollout worker when it is scored, its `trained` by the trainer later, into the same file: each
line is one write in append mode. Rollouts of `trained` are those whose tokens are known one by one (trainer_core/token_log.py):
`text` has one entry for each token from the first trained one on, `mask` one letter for each (t: trained, o: left out of the
loss for its ratio, a dot: context), `log_probs` (the sampler's), `ratio` and `entropy` (nats) one number for each t and o.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson

VERSION = 1
SPOOL_FILE = "spool.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
Level = Literal["info", "warning", "error"]


def encode_number(value: float) -> float | str:
    """JSON has no NaN and no infinity; they travel as words."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def decode_number(value: float | str) -> float:
    """Inverse of `encode_number`. Raises ValueError on any other text."""
    return float(value)


class Spool:
    """Appends lines to one file. Each line is one write, so a kill leaves at most one torn line at the end."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        self._complained = False

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        encoded = {name: encode_number(float(value)) for name, value in values.items()}
        self._write({"kind": "metrics", "step": step, "values": encoded})

    def event(self, step: int, level: Level, name: str, text: str, /, **data: Any) -> None:
        self._write({"kind": "event", "step": step, "level": level, "name": name, "text": text, "data": data})

    def rollout(self, step: int, rollout: Mapping[str, Any]) -> None:
        self._write({"kind": "rollout", "step": step, "rollout": rollout})

    def trained(self, step: int, record: Mapping[str, Any]) -> None:
        self._write({"kind": "trained", "step": step, "trained": record})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        try:
            record = {"v": VERSION, "t": time.time(), **line}
            self._file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        except (OSError, TypeError) as error:  # a full disk must not end training; said once, where the log shows it
            if not self._complained:
                self._complained = True
                print(f"spool: cannot write {self._file.name}: {error}", file=sys.stderr, flush=True)
