"""Many runs and many people at once, each in a process or connection of its own: nobody meets a locked database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.postgresql import Unavailable, cluster

ROOT = Path(__file__).resolve().parents[3]
LOAD = ("bench/metrics_load.py", "--seconds", "6", "--runs", "32", "--clients", "10")


def under_load(**environment: str) -> str:
    """Fails when anything was locked or refused, or when a point that was written is not stored."""
    done = subprocess.run(
        [sys.executable, *LOAD], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_32_runs_report_while_people_look() -> None:
    assert "failures: none" in under_load(DATABASE_URL="")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_on_postgresql() -> None:
    try:
        with cluster() as environment:
            assert "failures: none" in under_load(**environment)
    except Unavailable as reason:
        pytest.skip(str(reason))
