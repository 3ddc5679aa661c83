"""Faults of real parts: the vLLM server is killed in mid-run and started again; the worker of a real trainer is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.trainer_core.rollout.conftest import first_token, prompts
from tests.trainer_core.rollout.mini_trainer import MiniTrainer, config_for
from tests.trainer_core.rollout.test_worker import alive, wait_until
from trainer_core import AsyncGRPOConfig, AsyncGRPOTrainer
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.types import Rollout
from trainer_core.rollout.worker import RolloutWorkerError

if TYPE_CHECKING:
    from tests.vllm_server import RunningServer

# Servers that are started on a machine with much else to do take minutes.
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1500)]
SERVER_START_S = 900.0


class Counting(AsyncRolloutLoop):
    """Counts how often a rollout was begun."""

    begun = 0

    async def generate_one(self, row_index: int, row: dict[str, Any], epoch: int) -> Rollout:
        Counting.begun += 1
        return await super().generate_one(row_index, row, epoch)


def test_a_server_that_is_killed_and_started_again(
    server_to_kill: RunningServer, tiny_model: Path, tmp_path: Path
) -> None:
    """What was in flight runs again, nothing is counted twice, nothing fails, and steps go on with the new server."""
    server = server_to_kill
    finished: list[str] = []
    at_the_kill: list[int] = []
    config = config_for(
        server.url, tmp_path, max_staleness=2, max_completion_length=64, request_timeout=120.0,
        vllm_server_timeout=SERVER_START_S,
    )  # fmt: skip
    trainer = MiniTrainer(
        config, prompts(40), [first_token], tiny_model, loop_cls=Counting, model_name="policy",
        rollouts_path=tmp_path / "rollouts.jsonl",
    )  # fmt: skip

    async def body(trainer: MiniTrainer) -> None:
        told = trainer.loop.monitor.finished

        def count(rollout: Rollout) -> None:
            finished.append(rollout.rollout_id)
            told(rollout)

        trainer.loop.monitor.finished = count  # type: ignore[method-assign]
        await trainer.train(2)
        while trainer.loop.slots.in_flight < 4:
            await asyncio.sleep(0.001)
        at_the_kill.append(trainer.loop.slots.in_flight)
        os.killpg(server.pid, signal.SIGKILL)
        killed = time.monotonic()
        while not trainer.lost:
            await asyncio.sleep(0.02)
        assert time.monotonic() - killed < 30
        server.kill()  # and the memory that it shared is freed
        await asyncio.to_thread(server.start_again)
        await trainer.train(4)
        await asyncio.sleep(1.2)

    trainer.run(body, timeout=SERVER_START_S)
    assert trainer.lost == [server.url]
    assert Counting.begun >= len(finished) + at_the_kill[0], "what was in flight was not run again"
    lines = [
        json.loads(line)["rollout"]["rollout_id"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()
    ]
    assert len(set(lines)) == len(lines), "a rollout was stored twice"
    assert len(set(finished)) == len(finished), "a rollout was counted twice"
    assert set(lines) <= set(finished)
    assert set(Counter(sample.rollout_id for sample in trainer.samples).values()) == {1}
    assert set(trainer.trained.values()) == {1}, "a prompt counted twice"
    assert trainer.metrics.flush().get("rollout/failed_total", 0) == 0
    assert len(trainer.samples) == 6 * 8


def test_a_trainer_whose_worker_is_killed_ends_with_the_reason(
    tiny_server: RunningServer, tiny_model: Path, tmp_path: Path
) -> None:
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path), vllm_server_base_url=tiny_server.url, num_generations=4, max_steps=1000,
        per_device_train_batch_size=8, gradient_accumulation_steps=1, token_budget=0, max_staleness=1, save_strategy="no",
        max_completion_length=16, bf16=False, use_cpu=True, disable_tqdm=True, learning_rate=1e-9,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(str(tiny_model), first_token, args, prompts(40))
    family: list[psutil.Process] = []
    killed: list[float] = []

    def kill() -> None:
        assert wait_until(lambda: trainer.state.global_step >= 1, 600)
        assert trainer.generation is not None
        assert trainer.generation.worker.pid is not None
        family.extend(psutil.Process(trainer.generation.worker.pid).children(recursive=True))
        os.kill(trainer.generation.worker.pid, signal.SIGKILL)
        killed.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RolloutWorkerError, match=r"the rollout worker \(pid \d+\) was ended by SIGKILL"):
        trainer.train()
    killer.join()
    assert time.monotonic() - killed[0] < 30
    assert len(family) >= 2
    assert wait_until(lambda: not any(alive(process) for process in family))
