"""The store equals a plain model, whatever is written, repeated, reordered or killed: see machine.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support.postgresql import Unavailable, cluster

ROOT = Path(__file__).resolve().parents[3]


def run_machine(home: Path, examples: int, **environment: str) -> None:
    env = {**os.environ, "OFFBEAT_HOME": str(home), "DJANGO_SETTINGS_MODULE": "webapp.settings", **environment}
    for command in (
        ["manage.py", "migrate", "--verbosity", "0"],
        ["-m", "tests.webapp.metrics.machine", str(examples)],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert f"{examples} examples" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_on_sqlite(tmp_path: Path) -> None:
    run_machine(tmp_path, 40, DATABASE_URL="")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_on_postgresql(tmp_path: Path) -> None:
    try:
        with cluster() as environment:
            run_machine(tmp_path, 15, **environment)
    except Unavailable as reason:
        pytest.skip(str(reason))
