"""Environments of OpenEnv: a client of its protocol as an environment of a run.

    environment_factory=functools.partial(OpenEnv, functools.partial(EchoEnv, base_url="http://host:8000"), EchoAction)

OpenEnv itself is not imported. What is used of a client is `reset`, `step` and `close`, async or not (a sync client's calls run
in threads, since they wait for the server); results have `observation`, `reward` and `done`, and the action class is a pydantic
model. `connect(base_url)` needs neither: it speaks to a server with dictionaries, and asks it what an action is made of.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel

from trainer_core.rollout.openenv_session import Session
from trainer_core.rollout.tools import ToolThreads

PASSED_ON = ("seed", "episode_id")
"""Columns of a row that reset understands."""
BOOKKEEPING = {"done", "reward", "metadata"}
"""Fields of every observation and action that are not for the model."""
_THREADS = ToolThreads()


class OpenEnv:
    """`connect` makes a client, `action` builds an action from its fields. The reward is the sum over the episode.

    Without `action` the client takes the fields themselves, and has `action_schema()`.
    """

    def __init__(self, connect: Callable[[], Any], action: type[BaseModel] | None = None) -> None:
        self._connect = connect
        self._client: Any = connect()
        self._action = action
        self._schema = None if action is None else action.model_json_schema()
        self._reward: float | None = None
        self._done = False
        self._closing: set[asyncio.Task[Any]] = set()

    async def reset(self, **row: Any) -> str:
        """Begin an episode; the text says what there is to see, and what an action is made of."""
        wanted = {name: row[name] for name in PASSED_ON if row.get(name) is not None}
        self._reward, self._done = None, False
        if self._client is None:
            self._client = await _call(self._connect)
        seen = self._take(await self._ask("reset", **wanted))
        if self._schema is None:
            self._schema = await self._ask("action_schema")
        fields = self._schema.get("properties", {})
        described = {name: field for name, field in fields.items() if name not in BOOKKEEPING}
        return f"{seen}\n\nFields of an action: {json.dumps(described)}"

    async def act(self, action: dict) -> str:  # type: ignore[type-arg]  # what the model is told; it knows no parameters
        """Takes an action in the environment.

        Args:
            action: The fields of the action.
        """
        if self._done:
            return "The episode is over."
        return self._take(await self._ask("step", action if self._action is None else self._action(**action)))

    async def close(self) -> None:
        """Give the server's session back."""
        if self._client is not None:
            await _call(self._client.close)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def get_reward(self) -> float | None:
        """The sum of the episode's rewards; None when there were none."""
        return self._reward

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the client. One whose call was given up is left: its late answer would be taken for that of the next call."""
        if self._client is None:
            raise RuntimeError("the episode is over: a call took too long and was given up")
        try:
            return await _call(getattr(self._client, method), *arguments, **options)
        except asyncio.CancelledError:
            left, self._client = self._client, None
            task = asyncio.create_task(_call(left.close))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            raise

    def _take(self, result: Any) -> str:
        """Keep account of a step, and give what the model may see of it as JSON."""
        self._done = bool(result.done)
        if result.reward is not None:
            self._reward = (self._reward or 0.0) + float(result.reward)
        seen = result.observation
        values = seen.model_dump(mode="json") if isinstance(seen, BaseModel) else seen
        shown = {name: value for name, value in values.items() if name not in BOOKKEEPING}
        text = json.dumps(shown, ensure_ascii=False, default=str)
        return f"{text} The episode is over." if self._done else text


def connect(base_url: str) -> OpenEnv:
    """An environment that is played on the OpenEnv server at this address."""
    return OpenEnv(lambda: Session(base_url))


async def _call(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a call comes to. One that is not declared async may wait for the server, so it runs in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **options)
    result = await asyncio.get_running_loop().run_in_executor(_THREADS, partial(method, *arguments, **options))
    return await result if inspect.isawaitable(result) else result
