"""Many runs and many people at once, each in a process or connection of its own: nobody meets a locked database."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.postgresql import find_binaries

ROOT = Path(__file__).resolve().parents[3]
LOAD = ("bench/metrics_load.py", "--load-only", "--seconds", "6", "--runs", "32", "--clients", "10")


def under_load(database: str) -> str:
    """Fails when anything was locked or refused, or when a point that was written is not stored."""
    done = subprocess.run(
        [sys.executable, *LOAD, "--database", database],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_32_runs_report_while_people_look() -> None:
    assert "failures: none" in under_load("sqlite")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_binaries() is None, reason="PostgreSQL is not installed")
def test_the_same_on_postgresql() -> None:
    assert "failures: none" in under_load("postgresql")
