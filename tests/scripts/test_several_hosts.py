"""One run whose trainer ranks are on two hosts: a studio and `make worker` on real parts, both on this machine."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.support.postgresql import Unavailable, cluster
from tests.scripts.conftest import ROOT, RunningStudio
from tests.scripts.test_worker import WORKER, inside

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(3600)]
START_S, STEP_S = 900, 400
REWARD = """
def early_letters(completions, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "abcdefghijklm" for letter in text) / (len(text) or 1) for text in texts]
"""
END_S = 120
"""All of it is gone so many seconds after a kill, on a busy machine; the reaper looks every five."""


class TwoHosts:
    """A studio on host alpha, a worker on host beta, and a client of the API."""

    def __init__(self, home: Path, database: dict[str, str]) -> None:
        self.home = home
        own = {**database, "OFFBEAT_ADDRESS": "127.0.0.1"}
        self.studio = RunningStudio(home, {**own, "OFFBEAT_HOST": "alpha"})
        self.studio.wait_ready(START_S)
        broker = inside(self.studio, "from django.conf import settings; print(settings.CELERY_BROKER_URL)")
        self.beta_environment = {**self.studio.environment, "OFFBEAT_HOST": "beta", "CELERY_BROKER_URL": broker}
        self.beta = self.start_beta()
        token = inside(self.studio, "", "create_token", "admin", "--name", "test")
        headers = {"Authorization": f"Bearer {token}"}
        self.api = httpx.Client(base_url=f"{self.studio.url}/api", headers=headers, timeout=60)

    def start_beta(self) -> subprocess.Popen[bytes]:
        with open(self.home / "beta.log", "wb") as output:
            return subprocess.Popen(WORKER, cwd=ROOT, env=self.beta_environment, stdout=output, stderr=output)

    def hosts(self) -> dict[str, Any]:
        return {host["name"]: host for host in self.api.get("/hosts").json()}

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self.api.post(path, json=body or {})
        assert answer.status_code < 300, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def processes(self, host: str, words: str = "") -> list[psutil.Process]:
        """Those of runs on a host whose command has these words."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                env = process.environ()
                ours = env.get("OFFBEAT_HOME") == str(self.home) and env.get("OFFBEAT_HOST") == host
                if ours and "OFFBEAT_ATTEMPT" in env and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def rank(self, host: str) -> psutil.Process:
        """The trainer's process on a host."""
        found = [
            p for p in self.processes(host, "trainer_core.launch --spec") if "accelerate" not in " ".join(p.cmdline())
        ]
        (rank,) = [process for process in found if "RANK" in process.environ() and process.ppid() in
                   {launcher.pid for launcher in self.processes(host, "accelerate.commands.launch")}]  # fmt: skip
        return rank

    def stop(self) -> None:
        for process in self.processes("beta"):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.beta.poll() is None:
            self.beta.send_signal(signal.SIGINT)
            self.beta.wait(120)
        self.studio.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    home = tmp_path_factory.mktemp("two")
    try:
        with cluster() as database:
            hosts = TwoHosts(home, database)
            try:
                yield hosts
            finally:
                hosts.stop()
    except Unavailable as reason:
        pytest.skip(str(reason))


def wait_for(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)
    return value


class TrainingRun:
    """A run over both hosts, and what the API says of it."""

    def __init__(self, two: TwoHosts, model: Path) -> None:
        self.two = two
        spec = {
            "name": "over two hosts", "model": {"path": str(model)},
            "data": {"source": "reasoning_gym:products", "size": 200, "options": {"max_digits": 1}},
            "rewards": [{"name": "early_letters"}],
            "rollout": {"num_generations": 2, "max_completion_length": 12, "max_staleness": 2},
            "training": {"max_steps": 100_000, "learning_rate": 1e-4, "per_device_train_batch_size": 2,
                         "gradient_accumulation_steps": 1, "bf16": False, "gradient_checkpointing": False},
            "lora": {"r": 4, "alpha": 8},
            "server": {"max_model_len": 256, "dtype": "float32", "kv_cache_gib": 0.0625, "max_num_seqs": 16},
            "checkpoints": {"save_steps": 2, "save_total_limit": 3}, "resources": {"trainer_hosts": 2},
        }  # fmt: skip
        two.post("/rewards", {"source": REWARD})
        self.path = f"/runs/{two.post('/runs', {'spec': spec, 'launch': True})['id']}"

    def now(self) -> dict[str, Any]:
        found: dict[str, Any] = self.two.api.get(self.path).json()
        return found

    def step(self) -> int:
        run = self.now()
        assert run["state"] in ("queued", "starting", "running"), f"{run['state']}: {run['reason']}"
        return int(run["summary"].get("step") or 0)

    def wait_for_steps(self, count: int, seconds: float = START_S) -> None:
        begin = self.step()
        wait_for(lambda: self.step() >= begin + count, f"{count} steps after {begin}", seconds)

    def resume(self) -> list[str]:
        """Resume, and wait until it trains and has saved; returns its hosts, the first one first."""
        self.two.post(f"{self.path}/resume")
        number = len(self.first_steps())
        wait_for(lambda: self.step() >= 0 and len(self.first_steps()) > number, "its first step", START_S)
        self.wait_for_steps(3, STEP_S)
        hosts: list[str] = self.now()["attempts"][-1]["hosts"]
        return hosts

    def first_steps(self) -> list[int]:
        """The first step of each attempt."""
        events = self.two.api.get(f"{self.path}/events", params={"limit": 1000}).json()
        return [event["step"] for event in events if event["name"] == "first_step"]

    def holders(self) -> list[str | None]:
        """Which run has the device of each host."""
        return [device["run"] for host in self.two.hosts().values() for device in host["devices"]]

    def wait_for_end(self, state: str) -> str:
        """The run's reason, once it has ended and nothing of it is left on either host."""
        run = wait_for(lambda: (run := self.now()) and not run["live"] and run, "the run's end", END_S)
        assert run["state"] == state, run["reason"]
        two = self.two
        wait_for(lambda: not two.processes("alpha") and not two.processes("beta"), "the end of its processes", END_S)
        wait_for(lambda: self.holders() == [None, None], "the leases", END_S)  # a further host ends a moment later
        return str(run["reason"])


def test_a_run_over_two_hosts_trains_fails_whole_and_resumes(two: TwoHosts, tiny_model: Path) -> None:
    wait_for(
        lambda: {name for name, host in two.hosts().items() if host["alive"]} == {"alpha", "beta"}, "both", START_S
    )
    run = TrainingRun(two, tiny_model)
    run.wait_for_steps(4)
    attempt = run.now()["attempts"][-1]
    assert sorted(attempt["hosts"]) == ["alpha", "beta"]
    lead, other = attempt["hosts"]
    assert all(host["devices"][0]["run"] in run.path for host in two.hosts().values())
    assert {two.rank(lead).environ()["RANK"], two.rank(other).environ()["RANK"]} == {"0", "1"}
    assert not two.processes(other, "vllm.entrypoints"), "the server is on the first host"
    names = {log["name"] for log in two.api.get(f"{run.path}/logs").json()}
    assert {"trainer.log", "trainer-1.log", "supervisor-1.log"} <= names

    two.rank(other).kill()
    reason = run.wait_for_end("failed")
    assert reason.startswith(f"Trainer rank 1 on host {other} ended without a word")

    lead, _ = run.resume()
    (supervisor,) = two.processes(lead, "workers.supervisor")
    supervisor.kill()
    assert "The run's supervisor was killed" in run.wait_for_end("failed")

    run.resume()
    two.post(f"{run.path}/stop", {"save": True})
    assert run.wait_for_end("stopped") == "Saved a checkpoint and stopped."
    first_steps = run.first_steps()
    assert first_steps[0] == 1
    assert len(first_steps) == 3
    assert first_steps == sorted(set(first_steps)), "each attempt goes on from a checkpoint of the one before"
