"""OpenEnv's client contract, by a stand-in with the shapes of openenv-core 0.3: the package itself brings too much along."""

from __future__ import annotations

import asyncio
import functools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from tests.trainer_core.rollout.conftest import MakeTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout.environments import environment_tools
from trainer_core.rollout.openenv import OpenEnv


class Guess(BaseModel):
    number: int = Field(description="From 0 to 9")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Seen(BaseModel):
    hint: str
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass
class StepResult:
    observation: Seen
    reward: float | None = None
    done: bool = False


class Client:
    """Guessing behind OpenEnv's async client."""

    async def reset(self, **options: Any) -> StepResult:
        self.number = options.get("seed", 4)
        return StepResult(Seen(hint="from 0 to 9"))

    async def step(self, action: Guess) -> StepResult:
        found = action.number == self.number
        hint = "found" if found else "higher" if action.number < self.number else "lower"
        return StepResult(Seen(hint=hint), reward=1.0 if found else -0.1, done=found)

    async def close(self) -> None: ...


class SyncClient:
    """One whose calls are not awaited."""

    def reset(self, **options: Any) -> StepResult:
        return StepResult(Seen(hint="sync"))


def test_an_episode() -> None:
    async def play() -> None:
        environment = OpenEnv(Client, Guess)
        opening = await environment.reset(seed=7, prompt="p", answer="x")
        seen, _, fields = opening.partition("\n\nFields of an action: ")
        assert json.loads(seen) == {"hint": "from 0 to 9"}
        assert list(json.loads(fields)) == ["number"]
        assert environment.get_reward() is None
        act = environment_tools(environment)["act"]
        assert list(environment_tools(environment)) == ["act"]
        assert await act(action={"number": 3}) == '{"hint": "higher"}'
        assert await act(action={"number": 7}) == '{"hint": "found"} The episode is over.'
        assert await act(action={"number": 1}) == "The episode is over."
        assert environment.get_reward() == pytest.approx(0.9)
        environment._done = False
        with pytest.raises(ValueError, match="number"):
            await act(action={"numbre": 1})
        await environment.reset()
        assert environment.get_reward() is None

    asyncio.run(play())


def test_the_action_can_be_described_to_a_model() -> None:
    schema = get_json_schema(OpenEnv(Client, Guess).act)["function"]
    assert schema["name"] == "act"
    assert schema["parameters"]["properties"]["action"]["type"] == "object"


def test_a_sync_client() -> None:
    assert asyncio.run(OpenEnv(SyncClient, Guess).reset()).startswith('{"hint": "sync"}')


def test_a_run(make: MakeTrainer, server: StubServer, tiny_model: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    server.context = 2048
    said = ['<tool_call>{"name": "act", "arguments": {"action": {"number": %d}}}</tool_call>', "done"]

    def reply(body: dict[str, Any]) -> list[int]:
        turn = tokenizer.decode(body["prompt"]).count("assistant\n") - 1
        return tokenizer.encode(said[turn] % (len(server.requests) % 10) if turn == 0 else said[turn])

    server.reply = reply  # type: ignore[method-assign]
    trainer = make(
        rewards=[], environment_factory=functools.partial(OpenEnv, Client, Guess), max_completion_length=300,
        max_staleness=0,
    )  # fmt: skip
    trainer.run(lambda t: t.train(2))
    assert {sample.reward for sample in trainer.samples} <= {1.0, -0.1}
    assert "Fields of an action" in tokenizer.decode(trainer.samples[0].input_ids)
