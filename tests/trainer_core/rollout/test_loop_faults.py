"""What goes wrong around the loop: servers, rollouts, prompts, rewards, and the loop's own sudden end."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import datasets
import pytest
from aiohttp import web

from tests.trainer_core.rollout.conftest import MakeTrainer
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout import score_stage, watch
from trainer_core.rollout.loop import RolloutFailure
from trainer_core.rollout.score_stage import RewardFailure
from trainer_core.rollout.state import RolloutState


def broken(completions: list[Any], **columns: Any) -> list[float]:
    raise KeyError("gold")


def sometimes_broken(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[Any]:
    kinds: list[Any] = [lambda n: ["x"] * n, lambda n: [1.0], lambda n: [float("nan")] * n]
    size = len(completion_ids)
    return kinds[number[0] % 3](size) if number[0] % 4 == 3 else list(range(size))


def test_resume_after_kills_at_random_points_trains_every_prompt_once(make: MakeTrainer, server: StubServer) -> None:
    """Each life ends in the middle of things: groups in flight, being scored, and waiting in the queue."""
    server.delay_s = 0.01
    trained: dict[tuple[int, int], int] = {}
    text = RolloutState().to_json()
    rng = random.Random(5)
    for _ in range(12):
        trainer = make(rows=11, max_staleness=3, state=RolloutState.from_json(text))

        async def life(trainer: MiniTrainer) -> None:
            if trainer.state.prompts_done():
                before = len(server.requests)
                await asyncio.sleep(0.05)
                assert len(server.requests) == before, "the server has no resumed weights yet"
                trainer.push(trainer.state.weight_version)
            await trainer.train(rng.randint(1, 3))
            await asyncio.sleep(rng.uniform(0, 0.1))

        trainer.run(life)
        text = trainer.state.to_json()
        for pair, count in trainer.trained.items():
            trained[pair] = trained.get(pair, 0) + count
    assert set(trained.values()) == {1}, "a prompt was repeated"
    epochs = max(epoch for epoch, _ in trained)
    assert epochs >= 2
    for epoch in range(epochs - 1):
        assert {row for e, row in trained if e == epoch} == set(range(11)), "a prompt was skipped"


def test_a_server_that_goes_away_costs_nothing_but_time(make: MakeTrainer, server: StubServer) -> None:
    server.delay_s = 0.05
    trainer = make(rows=40, max_staleness=2)

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(2)
        server.down = True
        while not trainer.lost:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        server.down = False
        await trainer.train(4)
        await asyncio.sleep(1.2)

    trainer.run(body)
    assert trainer.lost == [server.url]
    assert not trainer.dropped
    assert set(trainer.trained.values()) == {1}
    values = trainer.metrics.flush()
    assert values.get("rollout/failed_total", 0) == 0
    lines = [json.loads(line)["rollout"] for line in trainer.rollouts_path.read_text().splitlines()]  # type: ignore[union-attr]
    assert len({line["rollout_id"] for line in lines}) == len(lines)


def test_a_group_that_begins_again_under_newer_weights_is_not_taken_for_stale(
    make: MakeTrainer, server: StubServer
) -> None:
    trainer = make(rows=40, max_staleness=0)

    async def hold(request: web.Request) -> None:
        """Answers nothing until the connections are cut."""
        while not server.down:
            await asyncio.sleep(0.01)
        server._cut_when_down(request)

    server.fault = hold

    async def body(trainer: MiniTrainer) -> None:
        while not server.requests:
            await asyncio.sleep(0.01)
        server.down = True
        while not trainer.lost or trainer.loop.client.servers[0].in_flight:
            await asyncio.sleep(0.02)
        server.fault = None
        trainer.state.weight_version += 1  # the push that failed; the server gets it when it is back
        server.down = False
        await trainer.train(1)

    trainer.run(body)
    assert not trainer.dropped
    assert {sample.weight_version for sample in trainer.samples} == {1}


def test_a_group_that_has_become_too_old_is_given_up(make: MakeTrainer, server: StubServer) -> None:
    """Its requests end at once, its samples are counted as dropped, its prompt is done, and its place is free."""
    trainer = make(rows=40, max_staleness=1, max_concurrent_rollouts=64)

    def of_first_group(request: dict[str, Any]) -> bool:
        return bool(request["prompt"] == server.requests[0]["prompt"])

    async def hold(request: web.Request) -> None:
        """The first group's four requests, which others may come between, are answered only when it has been given up."""
        if of_first_group(await request.json()):
            while not trainer.dropped:
                await asyncio.sleep(0.01)

    server.fault = hold

    async def body(trainer: MiniTrainer) -> None:
        while sum(map(of_first_group, server.requests)) < 4:
            await asyncio.sleep(0.01)
        trainer.push(1)
        await asyncio.sleep(0.2)
        assert not trainer.dropped, "it is still fresh enough"
        trainer.push(2)
        await asyncio.sleep(0.2)
        await trainer.train(3)
        await asyncio.sleep(1.2)

    trainer.run(body)
    given_up = [message for message in trainer.dropped if message.reason == "stale"]
    assert len(given_up) == 1, trainer.dropped
    assert (given_up[0].epoch, given_up[0].row_index) not in {(s.epoch, s.row_index) for s in trainer.samples}
    assert trainer.metrics.flush()["sample/dropped_stale_total"] == 4
    assert set(trainer.trained.values()) == {1}
    lines = [json.loads(line)["rollout"] for line in trainer.rollouts_path.read_text().splitlines()]  # type: ignore[union-attr]
    assert given_up[0].row_index not in {line["row_index"] for line in lines if line["epoch"] == 0}


def slow_to_score(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    time.sleep(0.1)
    return [float(ids[0]) + index / 10 for index, ids in enumerate(completion_ids)]


def test_groups_wait_to_be_scored_in_a_queue_of_bounded_length(
    make: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards that take long hold generation back, and the metrics of the score queue say so."""
    monkeypatch.setattr(score_stage, "SCORE_QUEUE_GROUPS", 2)
    trainer = make(rows=60, rewards=[slow_to_score], max_staleness=8, max_concurrent_rollouts=64)
    most: list[int] = []

    async def body(trainer: MiniTrainer) -> None:
        training = asyncio.create_task(trainer.train(8))
        while not training.done():
            most.append(trainer.loop.scoring.waiting)
            await asyncio.sleep(0.005)
        await training
        await asyncio.sleep(1.2)

    trainer.run(body)
    assert max(most) == 2
    values = trainer.metrics.flush()
    assert values["rollout/score_block_s"] > 0.1, "generation was not held"
    assert values["rollout/score_wait_s"] > 0.05
    assert values["rollout/score_s"] > 0.1
    assert 0 < values["rollout/score_queue_size"] <= 2


def test_training_goes_on_while_one_of_two_servers_is_away(make: MakeTrainer, server: StubServer) -> None:
    with StubServer() as second:
        server.delay_s = second.delay_s = 0.05
        trainer = make(rows=60, max_staleness=1, vllm_server_base_url=[server.url, second.url], vllm_server_timeout=1.0)

        async def body(trainer: MiniTrainer) -> None:
            await trainer.train(2)
            assert second.answered
            second.down = True
            while not trainer.lost:
                await trainer.train(1)
            await asyncio.sleep(1.5)  # longer than vllm_server_timeout
            await trainer.train(2)
            before = second.answered
            second.down = False
            while second.answered == before:
                await trainer.train(1)

        trainer.run(body)
        assert trainer.lost == [second.url]
    assert not trainer.dropped
    assert trainer.metrics.flush().get("rollout/failed_total", 0) == 0


def test_failed_rollouts_are_data_until_there_are_too_many(make: MakeTrainer, server: StubServer) -> None:
    server.refuse = 3
    trainer = make(max_generation_failures=4)
    trainer.run(lambda t: t.train(3))
    assert [event.name for event in trainer.events] == ["rollout_failed"]
    server.refuse = 10**6
    with pytest.raises(RolloutFailure, match=r"4 rollouts failed one after another; .*HTTP 400: no"):
        make(max_generation_failures=4).run(lambda t: t.train(3))


def test_prompts_that_do_not_fit_are_skipped_and_said(make: MakeTrainer, server: StubServer) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "x" * length}], "number": 0} for length in (300, 20, 234, 30, 21, 22)
    ]
    trainer = make(rows=datasets.Dataset.from_list(rows))

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(3)
        await asyncio.sleep(1.2)

    trainer.run(body)
    assert {(message.row_index, message.reason) for message in trainer.dropped} == {(0, "too_long")}
    assert "does not fit the server's context of 256" in trainer.events[0].text
    assert all(request["max_tokens"] + len(request["prompt"]) <= 256 for request in server.requests)
    clipped = [request for request in server.requests if request["max_tokens"] < 8]
    assert len(clipped) >= 4
    assert trainer.metrics.flush()["rollout/clipped_prompts_total"] == len(clipped)


def test_reward_functions_that_sometimes_fail_are_counted(make: MakeTrainer) -> None:
    trainer = make(rows=16, rewards=[sometimes_broken])

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(6)
        await asyncio.sleep(1.2)

    trainer.run(body)
    failures = [event for event in trainer.events if event.name == "reward_error"]
    texts = [event.text for event in failures]
    assert len(texts) == len(set(texts)) >= 2
    assert all(event.data["traceback"].startswith("Traceback") for event in failures)
    assert all(message.reason == "unscorable" for message in trainer.dropped)
    assert trainer.metrics.flush()["rewards/sometimes_broken/error_total"] == len(trainer.dropped)


def test_reward_functions_that_never_work_end_the_run(make: MakeTrainer) -> None:
    with pytest.raises(RewardFailure, match="none of the first 4 groups could be scored: broken: KeyError: 'gold'"):
        make(rewards=[broken]).run(lambda t: t.train(2), timeout=10)


def always_one(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def never_scored(completion_ids: list[list[int]], **columns: Any) -> list[None]:
    return [None] * len(completion_ids)


@pytest.mark.parametrize(
    "reward, text, reason",
    [
        (always_one, "all rewards were equal within each of the last 5 groups", "zero_variance"),
        (never_scored, "every reward of the last 5 groups was None", "unscorable"),
    ],
)
def test_rewards_that_teach_nothing_raise_an_alarm(
    make: MakeTrainer, monkeypatch: pytest.MonkeyPatch, reward: Any, text: str, reason: str
) -> None:
    monkeypatch.setattr(watch, "EQUAL_GROUPS", 5)
    trainer = make(rewards=[reward])

    async def body(trainer: MiniTrainer) -> None:
        while not trainer.events:
            await asyncio.sleep(0.01)

    trainer.run(body)
    assert trainer.events[0].name == "reward_alarm"
    assert trainer.events[0].text.startswith(text)
    assert {message.reason for message in trainer.dropped} == {reason}


def hangs_on_low_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    if any(ids[0] < 40 for ids in completion_ids):
        time.sleep(100)
    return [float(ids[0]) for ids in completion_ids]


def test_a_completion_that_hangs_the_reward_leaves_the_rest_of_its_group(make: MakeTrainer) -> None:
    trainer = make(rewards=[hangs_on_low_tokens], reward_timeout=0.4, num_generations=8, max_staleness=0)

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(4)
        await asyncio.sleep(1.2)

    trainer.run(body)
    assert all(sample.reward >= 40 for sample in trainer.samples)
    assert any(sample.group_size < 8 for sample in trainer.samples), "no group was scored in part"
    assert trainer.metrics.flush()["rewards/hangs_on_low_tokens/timeout_total"] >= 1
    assert not trainer.dropped or {message.reason for message in trainer.dropped} == {"unscorable"}
