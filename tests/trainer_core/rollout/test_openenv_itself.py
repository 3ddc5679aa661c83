"""OpenEnv's own package: its server played through our session, and its client through the adapter.

openenv brings more than a hundred packages along, some in versions that the server of ours does not go with, so it gets an
environment of its own under var/, which is made once.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.trainer_core.rollout.conftest import MakeTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from tests.trainer_core.rollout.test_openenv import guessing
from trainer_core.rollout.openenv import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[3]
GAME = Path(__file__).with_name("openenv_game.py")
REQUIRED = ("openenv==0.10.0", "aiohttp", "pydantic")


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter that has openenv. Skips where the package registry does not give it."""
    folder = ROOT / "var" / "test-openenv-0.10.0"
    interpreter = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        done = subprocess.run([interpreter, "-m", "pip", "install", "-q", *REQUIRED], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"openenv cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
        (folder / "complete").touch()
    return interpreter


@pytest.fixture(scope="module")
def url(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The game's server."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = tmp_path_factory.mktemp("openenv") / "log"
    with log.open("w") as output:
        server = subprocess.Popen([python, GAME, "serve", str(port)], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server of the game did not start"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def check(opening: str) -> None:
    seen, _, fields = opening.partition("\n\nFields of an action: ")
    assert json.loads(seen) == {"hint": "from 0 to 9"}
    assert list(json.loads(fields)) == ["number"]
    assert json.loads(fields)["number"]["description"] == "From 0 to 9"


def test_its_server_is_played_without_its_package(url: str) -> None:
    async def play() -> None:
        environment, other = connect(url), connect(url)
        check(await environment.reset(seed=7, prompt="p"))
        await other.reset(seed=2)
        assert await environment.act(action={"number": 3}) == '{"hint": "higher"}'
        assert await other.act(action={"number": 3}) == '{"hint": "lower"}'
        with pytest.raises(
            RuntimeError, match=r"Invalid message; number: Field required; numbre: .*\(VALIDATION_ERROR\)"
        ):
            await environment.act(action={"numbre": 3})
        assert await environment.act(action={"number": 7}) == '{"hint": "found"} The episode is over.'
        assert environment.get_reward() == pytest.approx(0.9)
        await environment.close()
        await other.close()

    asyncio.run(play())


def test_its_clients_are_environments(python: Path, url: str) -> None:
    """Both of its kinds, async and sync, where the package is installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, GAME, "play", url], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    episodes = json.loads(done.stdout.splitlines()[-1])
    assert len(episodes) == 2
    for opening, miss, find, reward, again, no_reward in episodes:
        check(opening)
        check(again)
        assert (miss, find) == ('{"hint": "higher"}', '{"hint": "found"} The episode is over.')
        assert reward == pytest.approx(0.9)
        assert no_reward is None


def test_a_run_on_its_server(make: MakeTrainer, server: StubServer, url: str, tiny_model: Any) -> None:
    trainer, tokenizer = guessing(make, server, url, tiny_model)
    trainer.run(lambda t: t.train(2), timeout=300)
    assert {sample.reward for sample in trainer.samples} <= {1.0, -0.1}
    assert len(trainer.samples) == 16
    assert "metadata" not in tokenizer.decode(trainer.samples[0].input_ids).partition("Fields of an action")[0]
