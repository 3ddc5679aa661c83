"""Histories of other tools, written here byte by byte as those tools write them, come out as the same numbers."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.webapp.cli.test_cli import offbeat, server  # noqa: F401  the fixture is used by name
from webapp.cli.client import Failure
from webapp.cli.readers import read
from webapp.metrics import charts
from webapp.runs.models import Run


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def message(*parts: tuple[int, Any]) -> bytes:
    """A protocol buffer of (field, int | bytes | str | ("d" or "f", number))."""
    out = b""
    for number, value in parts:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, tuple):
            out += varint(number << 3 | (1 if value[0] == "d" else 5)) + struct.pack("<" + value[0], value[1])
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def tensorboard_file(folder: Path) -> None:
    folder.mkdir(parents=True)
    events = [message((1, ("d", 1e9)), (3, "brain.Event:2"))]
    for step in range(4):
        plain = message((1, (message((1, "train/loss"), (2, ("f", 0.5 / (step + 1)))))))
        tensor = message((1, 1), (4, struct.pack("<f", math.inf)))
        newer = message((1, message((1, "eval/x"), (8, tensor))))
        events.append(message((1, ("d", 1e9 + step)), (2, step), (5, plain + newer)))
    framed = [struct.pack("<QI", len(event), 0) + event + b"\0\0\0\0" for event in events]
    (folder / "events.out.tfevents.1.host").write_bytes(b"".join(framed) + framed[-1][:20])  # and a torn one


def wandb_file(path: Path) -> None:
    """Long records, so that some lie across the log's blocks."""
    path.parent.mkdir(parents=True)
    config = message((1, message((1, "lr"), (16, "1e-05"))))
    records = [message((1, 1), (17, message((1, "abc"), (4, config), (8, "my run"))))]
    for step in range(300):
        row = {"_step": 2 * step, "_timestamp": 1e9 + step, "train/loss": step / 7, "text": "x" * 300, "deep": {"a": 1}}
        items = b"".join(message((1, message((1, key), (16, json.dumps(value))))) for key, value in row.items())
        records.append(message((2, items)))
    data = b":W&B\xe1\xbe\0"
    for record in records:
        first = True
        while record or first:
            left = 32768 - len(data) % 32768
            if left < 7:
                data += b"\0" * left
                continue
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            data += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    path.write_bytes(data)


def test_wandb(tmp_path: Path) -> None:
    wandb_file(tmp_path / "run-1-abc" / "run-abc.wandb")
    (history,) = read(tmp_path)
    assert (history.name, history.source, history.config) == ("my run", "wandb", {"lr": 1e-5})
    assert history.points == [
        (2 * step, 1e9 + step, {"train/loss": step / 7, "deep.a": 1.0}) for step in range(300)
    ]  # fmt: skip


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard_file(tmp_path / "logs" / "run7")
    (history,) = read(tmp_path)
    assert (history.name, history.source) == ("run7", "TensorBoard")
    assert history.points == [
        (step, 1e9 + step, {"train/loss": pytest.approx(0.5 / (step + 1)), "eval/x": math.inf}) for step in range(4)
    ]


def test_trackio(tmp_path: Path) -> None:
    base = sqlite3.connect(tmp_path / "project.db")
    base.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_id, timestamp, run_name, step, metrics)")
    base.execute("CREATE TABLE configs (id INTEGER PRIMARY KEY, run_id, run_name, config, created_at)")
    moment = "2026-11-30T15:53:50.500000+00:00"
    for step in range(3):
        values = json.dumps({"loss": step / 7, "reward": "NaN", "note": "x"})
        base.execute("INSERT INTO metrics VALUES (NULL, 'id1', ?, 'one', ?, ?)", (moment, step, values))
    base.execute("INSERT INTO metrics VALUES (NULL, 'id2', ?, 'two', 5, '{\"a\": 1}')", (moment,))
    base.execute("INSERT INTO configs VALUES (NULL, 'id1', 'one', '{\"lr\": 0.1}', ?)", (moment,))
    base.commit()
    base.close()
    one, two = read(tmp_path)
    assert (one.name, one.config, two.name, two.points[0][0]) == ("one", {"lr": 0.1}, "two", 5)
    assert [(step, values["loss"]) for step, _, values in one.points] == [(step, step / 7) for step in range(3)]
    assert math.isnan(one.points[0][2]["reward"])


def test_a_trainer_state_becomes_a_run(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    for last in (10, 20):
        folder = tmp_path / "out" / f"checkpoint-{last}"
        folder.mkdir(parents=True)
        log = [
            {"step": step, "epoch": step / 10, "loss": 1.0 / step, "reward": math.nan} for step in range(1, last + 1)
        ]
        (folder / "trainer_state.json").write_text(
            json.dumps({"global_step": last, "max_steps": 20, "log_history": log})
        )
    code, out, _ = offbeat(capsys, "import", str(tmp_path / "out"), "--tag", "old")
    assert code == 0
    assert "60 points of 20 steps" in out
    run = Run.objects.get(name="out")
    assert (run.state, run.tags) == ("completed", ["old"])
    found = {item["metric"]: item for item in charts.chart(run, ["loss", "reward"])["series"]}
    assert found["loss"]["y"].tolist() == pytest.approx([1.0 / step for step in range(1, 21)])
    assert found["reward"]["odd"] == [[row, ["nan"]] for row in range(20)]


@pytest.mark.parametrize(
    "name,content", [("x.wandb", b"zip"), ("trainer_state.json", b"{}"), ("a.db", b"no"), ("x.txt", b"")]
)
def test_what_is_no_history_is_said(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Failure, match=r"can't be read|holds no run"):
        read(tmp_path / name)
