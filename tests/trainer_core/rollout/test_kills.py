"""Runs that are killed: processes, pipes, spool, checkpoints and the files of the training position are the product's own.

What trains is a loop without a model, in a process of its own, and the server answers at once, so that ten kills take seconds.
Processes are forked rather than spawned for the same reason: a spawned one imports torch first.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.trainer_core.rollout.conftest import prompts
from tests.trainer_core.rollout.mini_trainer import config_for
from tests.trainer_core.rollout.stub_server import StubServer
from tests.trainer_core.rollout.test_worker import alive, wait_until
from trainer_core import checkpoint
from trainer_core.intake import SampleIntake
from trainer_core.rollout import worker as worker_module
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.messages import WeightsPushed
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.worker import RolloutWorker, RolloutWorkerError
from trainer_core.spool import Spool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FORK = multiprocessing.get_context("fork")
ROWS, EPOCHS, GENERATIONS, STEP_SAMPLES, SAVE_STEPS, QUEUE = 150, 3, 4, 8, 2, 24
Pair = tuple[int, int]


def a_third_is_equal(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float]:
    """No variance, and so nothing to learn, for each third row."""
    return [float(number[0] % 3 != 0) * index for index in range(len(completion_ids))]


def train(url: str, model: Path, folder: Path, life: int) -> None:
    """The trainer's side of a run, from the newest checkpoint to the end of the epochs. Ledger: a line for each step."""
    worker_module.multiprocessing = SimpleNamespace(get_context=lambda _: FORK)  # type: ignore[assignment]
    output = folder / "checkpoints"
    checkpoint.remove_leftovers(output)
    found = sorted(int(path.name.removeprefix("checkpoint-")) for path in output.glob("checkpoint-*"))
    step = found[-1] if found else 0
    state = checkpoint.load_rollout_state(output / f"checkpoint-{step}") if found else RolloutState()
    spool = Spool(folder / "spool.jsonl")
    spool.event(step, "info", "started", "Training started.", resumed=bool(found))
    config = config_for(
        url, folder, num_generations=GENERATIONS, per_device_train_batch_size=STEP_SAMPLES, max_staleness=4,
        queue_maxsize=QUEUE,
    )  # fmt: skip
    worker = RolloutWorker(
        config=config, loop_cls=AsyncRolloutLoop, model_path=str(model), train_dataset=prompts(ROWS),
        reward_funcs=[a_third_is_equal], reward_weights=[1.0], tools=None, environment_factory=None,
        rollouts_path=folder / "rollouts.jsonl", state=state,
    )  # fmt: skip
    intake = SampleIntake(
        worker, state=state, max_staleness=config.max_staleness, prompts_wanted=ROWS * EPOCHS, add=lambda *_: None,
        control_path=folder / "control", event=lambda *_, **__: None, server_back=lambda _: None,
    )  # fmt: skip
    worker.start()
    if found:
        worker.send(WeightsPushed(state.weight_version, "policy"))
    try:
        while True:
            wait_until(lambda: worker.queue_size() >= QUEUE, 5)  # a trainer slower than the server
            queued = worker.queue_size()
            samples = [sample for _ in range(STEP_SAMPLES) if (sample := intake.next()) is not None]
            if not samples:
                break
            step += 1
            for sample in samples:
                intake.finish(sample)
            state.weight_version += 1
            worker.send(WeightsPushed(state.weight_version, "policy"))
            spool.metrics(step, {"sample/rollout_queue_size": queued})
            trained = [(sample.epoch, sample.row_index, sample.rollout_id) for sample in samples]
            with open(folder / "ledger", "a") as ledger:
                ledger.write(json.dumps({"life": life, "step": step, "trained": trained}) + "\n")
            if step % SAVE_STEPS == 0 or len(samples) < STEP_SAMPLES:
                staged = checkpoint.staging_folder(output, step) / f"checkpoint-{step}"
                staged.mkdir(exist_ok=True)
                (staged / "model.safetensors").write_bytes(os.urandom(1 << 16))
                checkpoint.save_rollout_state(staged, state)
                checkpoint.publish(staged, output / staged.name)
        spool.event(step, "info", "finished", "All prompts are done.")
    except RolloutWorkerError as error:
        spool.event(step, "error", "failed", str(error))
    finally:
        worker.stop()


def serve(connection: Any) -> None:
    with StubServer() as server:
        server.delay_s = 0.002
        connection.send(server.url)
        connection.recv()


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a process of its own: this one has no threads, and so forks safely."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=serve, args=(there,))
    process.start()
    yield here.recv()
    here.send("stop")
    process.join(10)
    if process.is_alive():
        process.kill()


class Run:
    """A run folder, and the lives that its run has had."""

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        self.url, self.model, self.folder = url, model, folder
        folder.mkdir()
        self.begins: list[int] = []

    def start(self) -> BaseProcess:
        process = FORK.Process(target=train, args=(self.url, self.model, self.folder, len(self.begins)))
        self.begins.append(self.newest())
        process.start()
        return process

    def newest(self) -> int:
        """Step of the newest checkpoint."""
        found = (self.folder / "checkpoints").glob("checkpoint-*")
        return max((int(path.name.removeprefix("checkpoint-")) for path in found), default=0)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of a file; a kill may have torn the last one of a life."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def state(self) -> RolloutState:
        return checkpoint.load_rollout_state(self.folder / "checkpoints" / f"checkpoint-{self.newest()}")

    def trained(self) -> Counter[tuple[int, int, str]]:
        """What the last weights were trained on: of each life the steps up to the checkpoint that the next one began with."""
        kept: Counter[tuple[int, int, str]] = Counter()
        ends = [*self.begins[1:], self.newest()]
        for line in self.lines("ledger"):
            if line["step"] <= ends[line["life"]]:
                kept.update(tuple(entry) for entry in line["trained"])
        return kept


def prompts_of(trained: Counter[tuple[int, int, str]]) -> set[Pair]:
    return {(epoch, row) for epoch, row, _ in trained if epoch < EPOCHS}


def check(run: Run) -> None:
    """Each prompt once an epoch: trained with all its rollouts, or dropped because it teaches nothing."""
    trained = run.trained()
    assert set(trained.values()) == {1}, "a sample was trained twice"
    rollouts = Counter((epoch, row) for epoch, row, _ in trained if epoch < EPOCHS)
    assert set(rollouts.values()) == {GENERATIONS}, "a prompt was trained in part, or twice"
    state = run.state()
    for epoch in range(EPOCHS):
        assert state.done(epoch) == set(range(ROWS))


def live_and_die(run: Run, rng: random.Random, *, kill_worker: bool) -> bool:
    """One life, from the newest checkpoint to a kill some steps later; returns whether the queue was full at the end."""
    begun = len(run.lines("spool.jsonl"))
    process = run.start()
    assert process.pid is not None
    steps = rng.randint(1, 5)

    def queue_sizes() -> list[int]:
        lines = run.lines("spool.jsonl")[begun:]
        return [line["values"]["sample/rollout_queue_size"] for line in lines if line["kind"] == "metrics"]

    assert wait_until(lambda: len(queue_sizes()) >= steps or not process.is_alive(), 120)
    time.sleep(rng.uniform(0, 0.1))
    full = queue_sizes()[-1] >= QUEUE
    family = psutil.Process(process.pid).children(recursive=True)
    (worker,) = psutil.Process(process.pid).children()
    assert run.lines("spool.jsonl")[-1].get("name") != "finished", "there must be prompts left when the kill comes"
    killed = time.monotonic()
    if kill_worker:
        os.kill(worker.pid, signal.SIGKILL)
    else:
        process.kill()
    process.join(30)
    assert time.monotonic() - killed < 20
    assert wait_until(lambda: not any(alive(member) for member in family), 15)
    if kill_worker:
        last = run.lines("spool.jsonl")[-1]
        assert (last["name"], last["level"]) == ("failed", "error")
        assert f"the rollout worker (pid {worker.pid}) was ended by SIGKILL" in last["text"]
    return full


def test_ten_kills_of_real_processes_change_nothing_of_what_is_trained(
    url: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Killed with a full queue, at random moments, the trainer and the worker in turn."""
    whole = Run(url, tiny_model, tmp_path / "whole")
    process = whole.start()
    process.join(200)
    assert process.exitcode == 0
    check(whole)
    expected = {(epoch, row) for epoch in range(EPOCHS) for row in range(ROWS) if row % 3}
    assert prompts_of(whole.trained()) == expected

    run = Run(url, tiny_model, tmp_path / "killed")
    rng = random.Random(11)
    full = sum(live_and_die(run, rng, kill_worker=bool(kill % 2)) for kill in range(10))
    assert full >= 8, "kills are to come with a full queue"
    assert run.newest() > 0
    process = run.start()
    process.join(200)
    assert process.exitcode == 0
    assert run.lines("spool.jsonl")[-1]["name"] == "finished"
    check(run)
    assert prompts_of(run.trained()) == expected
