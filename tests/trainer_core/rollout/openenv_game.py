"""A guessing game written with the package openenv: its server, and its client as an environment of a run.

    python openenv_game.py serve PORT
    python openenv_game.py play URL     prints what an episode gave, as JSON

Runs in an environment that has openenv, which test_openenv_itself.py makes: the package and what it requires are not in ours.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(description="From 0 to 9")


class Seen(Observation):
    hint: str


class Guessing(Environment):
    """The number is the seed's last digit. A find is worth 1, any other guess costs a tenth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Seen:
        self.number = (4 if seed is None else seed) % 10
        return Seen(hint="from 0 to 9")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Seen:
        found = action.number == self.number
        hint = "found" if found else "higher" if action.number < self.number else "lower"
        return Seen(hint=hint, reward=1.0 if found else -0.1, done=found)

    @property
    def state(self) -> State:
        return State()


class Client(EnvClient[Guess, Seen, State]):
    def _step_payload(self, action: Guess) -> dict[str, Any]:
        return {"number": action.number}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Seen]:
        ended, reward = payload["done"], payload["reward"]
        return StepResult(Seen(**payload["observation"], done=ended, reward=reward), reward=reward, done=ended)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


async def play(url: str, *, sync: bool) -> list[Any]:
    """An episode of two guesses and the beginning of another, through the adapter."""
    from trainer_core.rollout.openenv import OpenEnv

    environment = OpenEnv(functools.partial(Client, base_url=url), Guess)
    if sync:
        environment = OpenEnv(lambda: Client(base_url=url).sync(), Guess)
    said = [
        await environment.reset(seed=7, prompt="p"),
        await environment.act(action={"number": 3}),
        await environment.act(action={"number": 7}),
        environment.get_reward(),
        await environment.reset(seed=2),
        environment.get_reward(),
    ]
    await environment.close()
    return said


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        import uvicorn

        app = create_fastapi_app(Guessing, Guess, Seen, max_concurrent_envs=8)
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
    else:
        print(json.dumps([asyncio.run(play(sys.argv[2], sync=sync)) for sync in (False, True)]))
