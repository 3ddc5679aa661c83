"""make run: it starts, watches and stops everything, and says in a sentence why it can't."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.scripts.conftest import ROOT, RunningStudio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_it_comes_up_restarts_what_is_killed_and_leaves_nothing(studio: RunningStudio) -> None:
    studio.wait_ready()
    assert studio.password
    assert httpx.get(f"{studio.url}/runs/").status_code == 302  # to the login page

    for part in ("uvicorn", "worker --pool", "beat -s", "valkey-server"):
        victim = studio.find(part)
        victim.kill()
        deadline = time.monotonic() + 30
        while not any(
            part in " ".join(process.cmdline()) for process in studio.processes() if process.pid != victim.pid
        ):
            assert time.monotonic() < deadline, f"{part} was not started again:\n{studio.text()[-2000:]}"
            time.sleep(0.2)
    studio.wait_for_answer(200, 60)

    studio.process.send_signal(signal.SIGINT)
    assert studio.process.wait(120) == 0
    assert studio.processes() == []
    assert "nothing is left running" in studio.text()


def test_a_second_studio_on_the_same_home_is_refused_and_harms_nothing(ready_studio: RunningStudio) -> None:
    before = {process.pid for process in ready_studio.processes()}
    environment = {**ready_studio.environment, "OFFBEAT_PORT": str(ready_studio.port + 1)}
    second = subprocess.run(
        [sys.executable, "scripts/studio.py", "--no-sample"], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    assert "A studio already runs on" in second.stdout
    assert {process.pid for process in ready_studio.processes()} == before
    assert httpx.get(f"{ready_studio.url}/api/health").status_code == 200


def test_a_port_in_use_is_said_before_anything_starts(
    ready_studio: RunningStudio, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = {**ready_studio.environment, "OFFBEAT_HOME": str(tmp_path_factory.mktemp("other"))}
    other = subprocess.run(
        [sys.executable, "scripts/studio.py", "--no-sample"], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert other.returncode == 1
    assert f"Port {ready_studio.port}" in other.stdout
    assert "OFFBEAT_PORT=" in other.stdout


def test_listening_beyond_this_machine_is_refused_with_the_printed_password(studio: RunningStudio) -> None:
    studio.wait_ready()
    studio.stop()
    environment = {**studio.environment, "OFFBEAT_BIND": "0.0.0.0", "OFFBEAT_ALLOWED_HOSTS": "offbeat.test"}
    exposed = subprocess.run(
        [sys.executable, "scripts/studio.py", "--no-sample"], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert exposed.returncode == 1
    assert "password of admin was never changed" in exposed.stdout
