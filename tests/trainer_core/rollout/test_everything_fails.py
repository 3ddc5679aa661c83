"""All faults at once, kills with a full queue, and a loop that is held up: the run goes on, and nothing counts twice."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.trainer_core.rollout.conftest import MakeTrainer, first_token
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout import client as client_module
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.state import RolloutState

Pair = tuple[int, int]


def hostile(completion_ids: list[list[int]], number: list[int], **columns: Any) -> Any:
    """Works for most rows; for others it raises, hangs, and returns too few, NaN and text."""
    size, kind = len(completion_ids), number[0] % 11
    if kind == 3:
        raise KeyError("gold")
    if kind == 5:
        time.sleep(100)
    wrong = {7: [1.0], 8: [float("nan")] * size, 9: ["x"] * size}
    return wrong.get(kind, [float(ids[0]) + index / 10 for index, ids in enumerate(completion_ids)])


class Hostile:
    """Answers one request of five with a fault of every kind in turn, and goes down once."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.kinds: Counter[str] = Counter()

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        if self._rng.random() > 0.2:
            return None
        kind = self._rng.choice(["400", "500", "429", "garbage", "not json", "cut", "slow"])
        self.kinds[kind] += 1
        if kind.isdigit():
            return web.json_response({"error": {"message": "no"}}, status=int(kind))
        if kind == "garbage":
            return web.json_response({"choices": [{"token_ids": [1], "logprobs": None, "finish_reason": "stop"}]})
        if kind == "not json":
            return web.Response(text="<html>")
        if kind == "slow":
            await asyncio.sleep(3)
            return web.Response(text="late")
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


def test_a_run_goes_on_through_all_faults_and_counts_every_rollout_once(
    make: MakeTrainer, server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RETRY_WAIT_S", 0.01)
    faults = server.fault = Hostile(seed=1)
    server.delay_s = 0.02
    trainer = make(
        rows=33, rewards=[hostile], max_staleness=2, max_generation_failures=60, reward_timeout=0.5, request_timeout=1.0
    )
    finished: list[str] = []

    async def body(trainer: MiniTrainer) -> None:
        told = trainer.loop.monitor.finished

        def count(rollout: Any) -> None:
            finished.append(rollout.rollout_id)
            told(rollout)

        trainer.loop.monitor.finished = count  # type: ignore[method-assign]
        await trainer.train(6)
        server.down = True
        while not trainer.lost:
            await asyncio.sleep(0.02)
        server.down = False
        await trainer.train(12)

    trainer.run(body)
    assert len(faults.kinds) == 7, f"not every fault happened: {faults.kinds}"
    lines = [json.loads(line)["rollout"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len({line["rollout_id"] for line in lines}) == len(lines), "a rollout was stored twice"
    assert len(set(finished)) == len(finished) <= server.answered, "a rollout was counted twice"
    assert {line["rollout_id"] for line in lines} <= set(finished)
    trained = Counter(sample.rollout_id for sample in trainer.samples)
    assert set(trained.values()) == {1}, "a rollout was trained twice"
    assert set(trainer.trained.values()) == {1}, "a prompt counted twice"
    dropped = {(message.epoch, message.row_index): message.reason for message in trainer.dropped}
    for message in trainer.dropped:
        if message.row_index % 11 in (3, 5, 7, 8, 9):
            assert message.reason in ("unscorable", "failed")
    assert "unscorable" in dropped.values()
    assert not any(sample.row_index % 11 in (3, 5, 7, 8, 9) for sample in trainer.samples)
    values = trainer.metrics.flush()
    assert values["rewards/hostile/timeout_total"] >= 1
    assert values["rewards/hostile/error_total"] >= 1
    assert values["rollout/vllm_retry_total"] >= 1
    assert values["rollout/failed_total"] >= 1


def even_rows_are_equal(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float]:
    return [float(number[0] % 3 != 0) * index for index in range(len(completion_ids))]


ROWS, EPOCHS = 17, 3


async def train_all(trainer: MiniTrainer) -> None:
    """Until three epochs are done."""
    while any(len(trainer.state.done(epoch)) < ROWS for epoch in range(EPOCHS)):
        await trainer.train(1)


def by_fate(trainer: MiniTrainer) -> dict[str, set[Pair]]:
    """Prompts of the three epochs: trained on, and dropped."""
    dropped = {(message.epoch, message.row_index) for message in trainer.dropped}
    trained = {(sample.epoch, sample.row_index) for sample in trainer.samples}
    return {
        "trained": {pair for pair in trained if pair[0] < EPOCHS},
        "dropped": {pair for pair in dropped if pair[0] < EPOCHS},
    }


def test_ten_kills_with_a_full_queue_change_nothing_of_what_is_trained(make: MakeTrainer, server: StubServer) -> None:
    """Checkpoints lie at random steps, and each kill comes some steps later, when the queue is full."""
    options: dict[str, Any] = {"rows": ROWS, "rewards": [even_rows_are_equal], "max_staleness": 3, "queue_maxsize": 12}
    whole = make(**options)
    whole.run(train_all)
    expected = by_fate(whole)
    assert len(expected["trained"]) + len(expected["dropped"]) == ROWS * EPOCHS

    rng = random.Random(7)
    text = RolloutState().to_json()
    found: dict[str, set[Pair]] = {"trained": set(), "dropped": set()}
    counted: Counter[Pair] = Counter()

    def keep(trainer: MiniTrainer, done: Counter[Pair]) -> None:
        """Take over what was done up to a checkpoint."""
        counted.update(done)
        for fate, pairs in by_fate(trainer).items():
            found[fate] |= {pair for pair in pairs if pair in done}

    for _ in range(10):
        trainer = make(**options, state=RolloutState.from_json(text))
        saved: list[tuple[str, Counter[Pair]]] = []

        async def life(trainer: MiniTrainer, saved: list[Any] = saved) -> None:
            trainer.push(trainer.state.weight_version)
            if rng.random() < 0.7:
                await trainer.train(rng.randint(1, 2))
            saved.append((trainer.state.to_json(), Counter(trainer.trained)))
            await trainer.train(rng.randint(0, 2))
            while len(trainer._queue) < 12:
                await asyncio.sleep(0.01)

        trainer.run(life)
        text, done = saved[0]
        keep(trainer, done)
    last = make(**options, state=RolloutState.from_json(text))

    async def to_the_end(trainer: MiniTrainer) -> None:
        trainer.push(trainer.state.weight_version)
        await train_all(trainer)

    last.run(to_the_end)
    keep(last, last.trained)
    assert {pair for pair in counted if pair[0] < EPOCHS} == expected["trained"] | expected["dropped"]
    assert set(counted.values()) == {1}, "a prompt was repeated"
    assert found == expected


class HoldsUp(AsyncRolloutLoop):
    """Does what nobody should: works in the event loop."""

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        if row_index == 3:
            time.sleep(0.4)
        return True


def test_a_loop_that_is_held_up_shows(make: MakeTrainer) -> None:
    trainer = make(rows=6, rewards=[first_token], loop_cls=HoldsUp, max_staleness=0)

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(4)
        await asyncio.sleep(1.2)

    trainer.run(body)
    assert trainer.metrics.flush()["rollout/event_loop_lag_s"] > 0.3


class Stuck:
    """An environment that hangs in `reset` for every other rollout."""

    made = 0

    def reset(self, **row: Any) -> None:
        Stuck.made += 1
        if Stuck.made % 2:
            time.sleep(1000)

    def get_reward(self) -> float:
        return random.random()


def test_an_environment_that_hangs_fails_its_rollout_only(make: MakeTrainer) -> None:
    trainer = make(environment_factory=Stuck, tool_timeout=0.3, rewards=[], max_generation_failures=50)
    trainer.run(lambda t: t.train(3))
    assert any("Stuck.reset took longer than tool_timeout (0.3 s)" in event.text for event in trainer.events)
    assert len(trainer.samples) == 24
