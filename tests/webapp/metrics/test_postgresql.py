"""The same tests on PostgreSQL, where one can be started: a cluster of its own, in a temporary folder, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = ("tests/webapp/metrics", "tests/webapp/runs/test_queries.py", "tests/webapp/api/test_runs.py")


def find_binaries() -> Path | None:
    """Folder of initdb and pg_ctl; Debian keeps them out of PATH."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@pytest.fixture
def database() -> Iterator[dict[str, str]]:
    """Environment variables that lead to the cluster."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    user: str | None = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        if "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
            pytest.skip("PostgreSQL does not run as root, and there is no user 'postgres'")
        user = "postgres"
    with tempfile.TemporaryDirectory(
        prefix="offbeat-pg-"
    ) as text:  # a short path: sockets allow some hundred characters
        folder = Path(text)
        if user:
            shutil.chown(folder, user)

        def run(*command: str) -> None:
            done = subprocess.run(command, capture_output=True, text=True, user=user, cwd=folder, timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr

        run(f"{binaries}/initdb", "-D", f"{folder}/data", "-U", "offbeat", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        run(f"{binaries}/pg_ctl", "start", "-w", "-D", f"{folder}/data", "-l", f"{folder}/log", "-o", options)
        try:
            yield {"DATABASE_URL": "postgresql://offbeat@/postgres", "PGHOST": text}
        finally:
            run(f"{binaries}/pg_ctl", "stop", "-w", "-m", "immediate", "-D", f"{folder}/data")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_holds_on_postgresql(database: dict[str, str]) -> None:
    ignored = f"--ignore={Path(__file__).relative_to(ROOT)}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS, ignored]
    environment = {**os.environ, **database}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
