"""The studio as `make run` starts it: scripts/studio.py in a home of its own, on a free port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


class RunningStudio:
    """A studio in the foreground of a process of its own. `password` is what it printed for the first account."""

    def __init__(self, home: Path, environment: dict[str, str] | None = None) -> None:
        self.home = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / "studio.log"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "CELERY_BROKER_URL")},
            "OFFBEAT_HOME": str(home), "OFFBEAT_PORT": str(self.port), "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }  # fmt: skip
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "scripts/studio.py", "--no-sample"], cwd=ROOT, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self.process

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self, seconds: float = 120) -> None:
        self.wait_for_answer(200, seconds)
        deadline = time.monotonic() + seconds
        while "Ready in" not in self.text():
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.2)

    def wait_for_answer(self, status: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/api/health", timeout=2).status_code == status:
                    return
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < deadline, f"no answer from {self.url} in {seconds} s:\n{self.text()[-3000:]}"
            time.sleep(0.2)

    @property
    def password(self) -> str:
        found = re.search(r"password: (\S+)", self.text())
        assert found, self.text()[-3000:]
        return found.group(1)

    def processes(self) -> list[psutil.Process]:
        """Everything that carries this home in its environment, but the studio itself."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get("OFFBEAT_STUDIO") == str(self.home) and process.status() != "zombie":
                    found.append(process)
        return [process for process in found if process.pid != self.process.pid]

    def find(self, text: str) -> psutil.Process:
        (found,) = [process for process in self.processes() if text in " ".join(process.cmdline())]
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in self.processes():
            process.kill()


@contextmanager
def running_studio(home: Path) -> Iterator[RunningStudio]:
    running = RunningStudio(home)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[RunningStudio]:
    with running_studio(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def ready_studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStudio]:
    """One that is up, for tests that leave it as it is: a start takes 20 s of processor time."""
    with running_studio(tmp_path_factory.mktemp("studio")) as running:
        running.wait_ready()
        yield running
