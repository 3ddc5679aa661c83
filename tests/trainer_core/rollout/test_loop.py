"""The whole loop in this process, against a server that injects faults, with real reward processes."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer_core.rollout.conftest import MakeTrainer, first_token
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core import AsyncRolloutLoop, Rollout, RolloutGroup, TurnRecord
from trainer_core.metrics import describe
from trainer_core.rollout.loop import RolloutFailure
from trainer_core.rollout.score_stage import RewardFailure


def even_rows_are_equal(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float | None]:
    """No variance in groups of even rows; a None in the others."""
    return [1.0 if row % 2 == 0 else (None if index == 0 else float(index)) for index, row in enumerate(number)]


def test_samples_lines_and_metrics(make: MakeTrainer, server: StubServer, tmp_path: Path) -> None:
    trainer = make()

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(5)
        await asyncio.sleep(1.2)

    trainer.run(body)
    assert len(trainer.samples) == 40
    for group_id in {sample.group_id for sample in trainer.samples}:
        group = [sample for sample in trainer.samples if sample.group_id == group_id]
        assert {sample.group_size for sample in group} == {4}
        rewards = np.array([sample.reward for sample in group])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        np.testing.assert_allclose([sample.advantage for sample in group], expected)
    for sample in trainer.samples:
        trained = np.flatnonzero(sample.completion_mask)
        assert sample.input_ids[trained[0]] == sample.reward
        assert trained.tolist() == list(range(trained[0], len(sample.input_ids)))
        np.testing.assert_allclose(sample.log_probs[trained], -1.0 - 0.01 * np.arange(len(trained)), rtol=1e-6)
    lines = [json.loads(line)["rollout"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    stored = {line["rollout_id"]: line for line in lines}
    for sample in trainer.samples:
        line = stored[sample.rollout_id]
        assert line["rewards"] == {"first_token": sample.reward}
        assert line["advantage"] == sample.advantage
        assert line["tokens"] == int(sample.completion_mask.sum())
        assert line["prompt"] == [{"role": "user", "content": f"row {sample.row_index}"}]
        assert line["completion"][0]["role"] == "assistant"
    values = trainer.metrics.flush()
    assert all(describe(name) is not None for name in values)
    assert (
        1
        <= values["completions/min_length"]
        <= values["completions/mean_length"]
        <= values["completions/max_length"]
        <= 6
    )
    assert values["rewards/first_token/error_total"] == 0
    assert values["rollout/turns_mean"] == 1
    assert values["rollout/concurrency_cap"] == 8
    assert len({request["seed"] for request in server.requests}) == len(server.requests)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_staleness_is_held(make: MakeTrainer, server: StubServer, max_staleness: int) -> None:
    server.delay_s = 0.02
    trainer = make(max_staleness=max_staleness)
    trainer.step_s = 0.05
    trainer.run(lambda t: t.train(12))
    if max_staleness == 0:
        assert set(trainer.staleness) == {0}
        assert len(server.requests) <= 13 * 8
    else:
        assert max(trainer.staleness) >= 1
        assert sum(age > max_staleness for age in trainer.staleness) <= 0.1 * len(trainer.staleness)
    # Held back by slow groups, dispatch may leave out a version.
    asked = {request["model"] for request in server.requests}
    assert "policy" in asked
    assert len(asked) >= 6


def test_steps_that_are_no_multiple_of_groups_do_not_stop_a_synchronous_run(make: MakeTrainer) -> None:
    trainer = make(max_staleness=0, token_budget=100, per_device_train_batch_size=6)
    trainer.run(lambda t: t.train(8))
    assert trainer.staleness.count(0) == 48


def test_groups_without_variance_are_dropped_refilled_and_count(make: MakeTrainer) -> None:
    trainer = make(rows=10, rewards=[even_rows_are_equal], max_staleness=0)

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(2)
        await asyncio.sleep(1.2)

    trainer.run(body)
    assert {message.reason for message in trainer.dropped} == {"zero_variance"}
    assert all(message.row_index % 2 == 0 for message in trainer.dropped)
    assert all(sample.row_index % 2 == 1 for sample in trainer.samples)
    # one of the four rollouts is unscorable: not trained, and not in the baseline
    assert {sample.group_size for sample in trainer.samples} == {3}
    assert {sample.reward for sample in trainer.samples} == {1.0, 2.0, 3.0}
    values = trainer.metrics.flush()
    assert values["rollout/dropped_groups_total"] == len(trainer.dropped)
    assert 0 < values["frac_reward_zero_std"] < 1


class RefusesAll(AsyncRolloutLoop):
    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        return False


def test_an_epoch_refused_as_a_whole_is_an_error(make: MakeTrainer) -> None:
    with pytest.raises(RolloutFailure, match="filter_prompt refused every prompt of epoch 0"):
        make(loop_cls=RefusesAll).run(lambda t: t.train(1), timeout=10)


class OwnGeneration(AsyncRolloutLoop):
    """Scores inside generate_one, and turns advantages around."""

    async def generate_one(self, row_index: int, row: dict[str, Any], epoch: int) -> Rollout:
        turn = await self.client.complete(self.policy, [1, 2, 3], 4)
        assert isinstance(turn, TurnRecord)
        message = {"role": "assistant", "content": "x"}
        return Rollout(
            f"{row_index}-{epoch}-{random.random()}", row["prompt"], [message], [turn], reward=float(turn.output_ids[0])
        )

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        return -super().compute_advantages(group)


def test_a_custom_generation_with_its_own_reward(make: MakeTrainer) -> None:
    trainer = make(rewards=[], loop_cls=OwnGeneration, scale_rewards="none")
    trainer.run(lambda t: t.train(3))
    for sample in trainer.samples:
        assert sample.input_ids[:3].tolist() == [1, 2, 3]
        assert sample.reward == sample.input_ids[3]
    group = [sample for sample in trainer.samples if sample.group_id == trainer.samples[0].group_id]
    rewards = np.array([sample.reward for sample in group])
    np.testing.assert_allclose([sample.advantage for sample in group], rewards.mean() - rewards)


class ReturnsNothing(AsyncRolloutLoop):
    async def generate_one(self, row_index: int, row: dict[str, Any], epoch: int) -> Any:
        await self.client.complete(self.policy, [1, 2, 3], 4)


class ReturnsTooFew(AsyncRolloutLoop):
    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        return super().compute_advantages(group)[1:]


class Divides(AsyncRolloutLoop):
    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        return group.rewards * np.nan


@pytest.mark.parametrize(
    "loop_cls, text",
    [
        (ReturnsNothing, "the last error was: generate_one returned a NoneType; a Rollout is needed"),
        (ReturnsTooFew, r"compute_advantages returned an array of shape \(3,\) for 4 rollouts"),
        (Divides, "compute_advantages returned .*; finite numbers are needed where a reward is one"),
    ],
)
def test_a_loop_that_returns_what_cannot_be_trained_on_is_a_sentence(
    make: MakeTrainer, loop_cls: Any, text: str
) -> None:
    with pytest.raises((RolloutFailure, RewardFailure), match=text):
        make(loop_cls=loop_cls).run(lambda t: t.train(1), timeout=20)


class WithoutTurns(AsyncRolloutLoop):
    async def generate_one(self, row_index: int, row: dict[str, Any], epoch: int) -> Rollout:
        message = {"role": "assistant", "content": "x"}
        return Rollout(f"{random.random()}", row["prompt"], [message], [], reward=random.random())


def test_rollouts_without_turns_are_dropped(make: MakeTrainer) -> None:
    trainer = make(rewards=[], loop_cls=WithoutTurns)

    async def body(trainer: MiniTrainer) -> None:
        while len(trainer.dropped) < 4:
            await asyncio.sleep(0.01)

    trainer.run(body)
    assert {message.reason for message in trainer.dropped} == {"failed"}


def test_mask_truncated_completions_leaves_them_out_of_the_samples(make: MakeTrainer, server: StubServer) -> None:
    server.reply = lambda body: list(range(body["max_tokens"] if random.random() < 0.4 else 2))  # type: ignore[method-assign]
    trainer = make(mask_truncated_completions=True, rewards=[by_length])
    trainer.run(lambda t: t.train(4))
    assert not any(sample.truncated for sample in trainer.samples)
    assert any(sample.group_size < 4 for sample in trainer.samples)


def by_length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [len(ids) + random.random() for ids in completion_ids]


def doubled(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


class Guess:
    """An environment with one tool, which is what scores."""

    def reset(self, number: int, **row: Any) -> str:
        self.number, self.asked = number, 0
        return f"Secret {number}."

    async def look(self) -> int:
        """Look at the secret."""
        self.asked += 1
        return self.number

    def get_reward(self) -> float:
        return float(self.asked) + random.random()


def test_tools_and_environments_turn_by_turn(make: MakeTrainer, server: StubServer, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    calls = [
        'I look. <tool_call>{"name": "look", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "doubled", "arguments": {"number": 21}}</tool_call>',
        "42",
    ]

    def reply(body: dict[str, Any]) -> list[int]:
        text = tokenizer.decode(body["prompt"])
        turn = text.count("assistant\n") - 1
        return tokenizer.encode(calls[turn] + str(random.randrange(10)) if turn == 2 else calls[turn])

    server.reply = reply  # type: ignore[method-assign]
    server.context = 2048
    trainer = make(
        rewards=[first_token],
        tools=[doubled],
        environment_factory=Guess,
        max_completion_length=400,
        per_device_train_batch_size=4,
    )

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(2)
        await asyncio.sleep(1.2)

    trainer.run(body)
    sample = trainer.samples[0]
    text = tokenizer.decode(sample.input_ids)
    assert f"row {sample.row_index}\n\nSecret {sample.row_index}." in text
    assert f"tool\n{sample.row_index}<|im_end|>" in text
    assert "tool\n42<|im_end|>" in text
    assert sample.reward > 1, "the reward function's and the environment's are added"
    values = trainer.metrics.flush()
    assert values["rollout/turns_mean"] == 3
    assert values["tools/call_frequency"] == 2
    assert values["tools/look/call_total"] == values["tools/doubled/call_total"] > 0
    assert values["tools/failure_frequency"] == 0
    assert values["env/reset_s"] >= 0
    assert values["tools/loop_exhausted_frac"] == 0
    # the template of the tiny models knows no tools
    assert [(event.name, event.level) for event in trainer.events] == [("tools_not_shown", "warning")]
    assert "says nothing of the tools (doubled, look)" in trainer.events[0].text


def test_all_turns_together_stay_within_the_token_limit(
    make: MakeTrainer, server: StubServer, tiny_model: Path
) -> None:
    """A model that calls for ever: each turn may use what earlier ones left, and the last one is cut."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    call = tokenizer.encode('<tool_call>{"name": "doubled", "arguments": {"number": 21}}</tool_call>')
    limit = 3 * len(call) - 10
    server.reply = lambda body: call[: body["max_tokens"]]  # type: ignore[method-assign]
    server.context = 4096
    trainer = make(tools=[doubled], max_completion_length=limit, rewards=[by_length], max_staleness=0)
    trainer.run(lambda t: t.train(1))
    asked = {request["max_tokens"] for request in server.requests}
    assert asked == {limit, limit - len(call), limit - 2 * len(call)}
    for sample in trainer.samples:
        assert sample.truncated
        assert sample.completion_mask.sum() == limit


def test_turns_with_calls_have_a_limit(make: MakeTrainer, server: StubServer, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    call = tokenizer.encode('<tool_call>{"name": "doubled", "arguments": {"number": 21}}</tool_call>')
    server.reply = lambda body: call  # type: ignore[method-assign]
    server.context = 4096
    trainer = make(
        tools=[doubled], max_completion_length=3000, max_tool_calling_iterations=2, rewards=[by_length], max_staleness=0
    )

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(1)
        await asyncio.sleep(1.2)

    trainer.run(body)
    lines = [json.loads(line)["rollout"] for line in trainer.rollouts_path.read_text().splitlines()]  # type: ignore[union-attr]
    assert {line["turns"] for line in lines} == {3}
    assert {len(line["completion"]) for line in lines} == {5}, "the calls of the last turn are not made"
    values = trainer.metrics.flush()
    assert values["tools/loop_exhausted_frac"] == 1
    assert values["tools/call_frequency"] == 2
