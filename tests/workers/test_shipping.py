"""What a run wrote reaches the database exactly once, whoever is killed in between, and a busy database is waited for."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.conftest import REPOSITORY, Studio, wait_for
from trainer_core.spool import Spool

SHIP = """
import sys, django
django.setup()
from webapp.runs.models import Attempt
from workers import shipping
attempt = Attempt.objects.get(pk=sys.argv[1])
print("ready", flush=True)
while any(shipping.ship_next(attempt, stream) for stream in shipping.STREAMS):
    pass
print("done", flush=True)
"""


@pytest.fixture
def attempt(make_run: Callable[..., Any]) -> Any:
    attempt = make_run("complete").current_attempt
    attempt.folder.mkdir(parents=True)
    return attempt


def write(attempt: Any, steps: int) -> None:
    spool, rollouts = Spool(attempt.folder / "spool.jsonl"), Spool(attempt.folder / "rollouts.jsonl")
    for step in range(1, steps + 1):
        spool.metrics(step, {"reward": float(step), "loss": 1 / step})
        spool.event(step, "info", "note", f"step {step}")
        rollouts.rollout(step, {"group_id": str(step), "row_index": step, "reward": 1.0, "text": "x" * 300})


def assert_exactly_once(attempt: Any, steps: int) -> None:
    from webapp.metrics.models import Series

    attempt.refresh_from_db()
    assert attempt.spool_offset == (attempt.folder / "spool.jsonl").stat().st_size
    assert attempt.rollouts_offset == (attempt.folder / "rollouts.jsonl").stat().st_size
    assert {series.name: series.points for series in Series.objects.filter(attempt=attempt)} == {
        "reward": steps, "loss": steps,
    }  # fmt: skip
    assert list(attempt.events.filter(name="note").order_by("id").values_list("step", flat=True)) == list(
        range(1, steps + 1)
    )
    assert sorted(attempt.run.rollouts.values_list("row_index", flat=True)) == list(range(1, steps + 1))


@given(
    lines=st.lists(st.binary(max_size=60).map(lambda line: line.replace(b"\n", b"")), max_size=30),
    torn=st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
    size=st.integers(1, 80),
)
def test_pieces_are_whole_lines_and_together_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], torn: bytes, size: int
) -> None:
    from workers.shipping import whole_lines

    path = tmp_path_factory.mktemp("lines") / "spool.jsonl"
    whole = b"".join(line + b"\n" for line in lines)
    path.write_bytes(whole + torn)
    pieces: list[bytes] = []
    while piece := whole_lines(path, sum(map(len, pieces)), size):
        assert piece.endswith(b"\n")
        pieces.append(piece)
    assert b"".join(pieces) == whole


def test_a_file_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    from workers.shipping import whole_lines

    assert whole_lines(tmp_path / "spool.jsonl", 0) == b""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_or_doubled(
    studio: Studio, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shippers of small pieces are killed after random times, again and again; the last one is left to finish."""
    steps = 3000
    write(attempt, steps)
    small_pieces = SHIP.replace('print("ready"', 'shipping.whole_lines.__defaults__ = (4096,)\nprint("ready"')
    dice = random.Random(5)
    kills = 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", small_pieces, str(attempt.pk)], cwd=REPOSITORY, env=studio.env, stdout=subprocess.PIPE
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(dice.uniform(0.0, 0.25))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
    assert kills > 6, "most were killed before they were done"
    subprocess.run([sys.executable, "-c", SHIP, str(attempt.pk)], cwd=REPOSITORY, env=studio.env, check=True)
    assert_exactly_once(attempt, steps)


def test_two_shippers_at_once_do_not_double(studio: Studio, attempt: Any) -> None:
    write(attempt, 2000)
    small_pieces = SHIP.replace('print("ready"', 'shipping.whole_lines.__defaults__ = (4096,)\nprint("ready"')
    both = [
        subprocess.Popen([sys.executable, "-c", small_pieces, str(attempt.pk)], cwd=REPOSITORY, env=studio.env)
        for _ in range(2)
    ]
    assert [process.wait(60) for process in both] == [0, 0]
    assert_exactly_once(attempt, 2000)


def test_a_locked_database_delays_but_loses_nothing(
    studio: Studio, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import connections

    from workers import shipping

    monkeypatch.setitem(connections.settings["default"]["OPTIONS"], "timeout", 0.2)
    monkeypatch.setattr(shipping, "INTERVAL_S", 0.1)
    monkeypatch.setattr(shipping, "LONGEST_PAUSE_S", 0.5)
    write(attempt, 50)
    blocker = sqlite3.connect(studio.home / "db.sqlite3", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    shipper = shipping.Shipper(attempt)
    shipper.start()
    time.sleep(1.5)
    assert shipper.is_alive()
    attempt.refresh_from_db()
    assert attempt.spool_offset == 0
    blocker.execute("ROLLBACK")
    blocker.close()
    shipper.finish(20)
    assert_exactly_once(attempt, 50)


def test_lines_written_while_it_ships_arrive_and_the_last_ones_too(studio: Studio, attempt: Any) -> None:
    from workers.shipping import Shipper

    shipper = Shipper(attempt)
    shipper.start()
    spool = Spool(attempt.folder / "spool.jsonl")
    spool.event(1, "info", "started", "Here.")
    wait_for(lambda: attempt.events.filter(name="started").exists(), "the event", 5)
    spool.event(2, "info", "finished", "Done.")
    shipper.finish(10)
    assert attempt.events.filter(name="finished").exists()
