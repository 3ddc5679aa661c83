"""make worker: a further machine's part, on the studio's database and broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from bench.support.postgresql import Unavailable, cluster
from tests.scripts.conftest import ROOT, RunningStudio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WORKER = [sys.executable, "scripts/studio.py", "--worker"]


def test_a_worker_without_the_studios_addresses_is_refused(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "CELERY_BROKER_URL")
    }
    environment["OFFBEAT_HOME"] = str(tmp_path)
    refused = subprocess.run(WORKER, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "DATABASE_URL and CELERY_BROKER_URL must be set" in refused.stdout


def test_a_second_host_registers_and_leaves_nothing(tmp_path: Path) -> None:
    try:
        with cluster() as database:
            two_hosts(tmp_path, database)
    except Unavailable as reason:
        pytest.skip(str(reason))


def two_hosts(home: Path, database: dict[str, str]) -> None:
    studio = RunningStudio(home, {**database, "OFFBEAT_HOST": "alpha"})
    try:
        studio.wait_ready()
        broker = inside(studio, "from django.conf import settings; print(settings.CELERY_BROKER_URL)")
        environment = {**studio.environment, "OFFBEAT_HOST": "beta", "CELERY_BROKER_URL": broker}
        log = home / "beta.log"
        with open(log, "wb") as output:
            worker = subprocess.Popen(WORKER, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        token = inside(studio, "", "create_token", "admin", "--name", "test")
        api = httpx.Client(base_url=f"{studio.url}/api", headers={"Authorization": f"Bearer {token}"}, timeout=30)
        deadline = time.monotonic() + 90
        while {host["name"] for host in api.get("/hosts").json() if host["alive"]} != {"alpha", "beta"}:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(60) == 0
        assert "nothing is left running" in log.read_text()
        assert not [process for process in psutil.process_iter() if mark(process) == f"{home}#beta"]
        assert api.get("/health").status_code == 200
    finally:
        studio.stop()


def inside(studio: RunningStudio, code: str, *command: str) -> str:
    """What a line of Python with the studio's settings prints, or a management command."""
    arguments = ["manage.py", *command] if command else ["manage.py", "shell", "--no-imports", "-c", code]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=studio.environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def mark(process: psutil.Process) -> str:
    try:
        return process.environ().get("OFFBEAT_STUDIO", "")
    except psutil.Error:
        return ""
