"""The same tests on PostgreSQL, where one can be started: a cluster of its own, in a temporary folder, on a Unix socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.postgresql import Unavailable, cluster

ROOT = Path(__file__).resolve().parents[3]
TESTS = ("tests/webapp/metrics", "tests/webapp/runs/test_queries.py", "tests/webapp/api/test_runs.py")


@pytest.fixture
def database() -> Iterator[dict[str, str]]:
    """Environment variables that lead to a cluster."""
    try:
        with cluster() as environment:
            yield environment
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_holds_on_postgresql(database: dict[str, str]) -> None:
    ignored = [f"--ignore=tests/webapp/metrics/{name}.py" for name in ("test_postgresql", "test_machine", "test_load")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS, *ignored]
    environment = {**os.environ, **database}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
