"""Environments: an object for each rollout, whose `reset` opens it, whose methods are tools, whose `get_reward` scores it.

An environment may have a `close`, which is called when it is thrown away and when the run ends.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any

from trainer_core.rollout.tools import Metrics, Tool, tool_table

RESERVED = ("reset", "get_reward", "close")


class EnvironmentPool:
    """Environments are made when needed and used again after a `reset`; one whose rollout failed is thrown away.

    A call may take `timeout` seconds; a slower one raises RuntimeError, which fails the rollout.
    """

    def __init__(self, factory: Callable[[], Any], executor: Executor, metrics: Metrics, timeout: float) -> None:
        self._factory, self._executor, self._metrics, self._timeout = factory, executor, metrics, timeout
        self._idle: list[Any] = []

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        environment = self._idle.pop() if self._idle else await self._call(self._factory)
        try:
            yield environment
        except BaseException:
            await self._discard(environment)
            raise
        self._idle.append(environment)

    async def close(self) -> None:
        """Close those that are not in use; the others are closed when their rollouts end."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(self._discard(environment) for environment in idle))

    async def _discard(self, environment: Any) -> None:
        if not hasattr(environment, "close"):
            return
        try:
            await self._call(environment.close)
        # it is thrown away in any case, and what made it useless has been told
        except Exception as error:  # noqa: BLE001
            print(f"closing an environment: {type(error).__name__}: {error}", flush=True)

    async def reset(self, environment: Any, row: dict[str, Any]) -> str | None:
        """Reset for a row; a text it returns is shown to the model after the prompt."""
        started = time.perf_counter()
        observation = await self._call(environment.reset, **row)
        self._metrics.add("env/reset_s", time.perf_counter() - started)
        return observation if isinstance(observation, str) else None

    async def reward(self, environment: Any) -> float | None:
        """The environment's own reward; None without a `get_reward`."""
        if not hasattr(environment, "get_reward"):
            return None
        started = time.perf_counter()
        reward = await self._call(environment.get_reward)
        self._metrics.add("env/reward_s", time.perf_counter() - started)
        return None if reward is None else float(reward)

    async def _call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                if inspect.iscoroutinefunction(function):
                    return await function(**arguments)
                result = await loop.run_in_executor(self._executor, lambda: function(**arguments))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the environment's own
            name = getattr(function, "__qualname__", type(function).__name__)
            raise RuntimeError(f"{name} took longer than tool_timeout ({self._timeout:g} s)") from error


def environment_tools(environment: Any) -> dict[str, Tool]:
    """The public methods of an environment that the model may call."""
    names = [name for name in dir(environment) if not name.startswith("_") and name not in RESERVED]
    # A property is not looked at: that would run it.
    methods = [
        getattr(environment, name)
        for name in names
        if not isinstance(inspect.getattr_static(environment, name), property | functools.cached_property)
    ]
    return tool_table([method for method in methods if inspect.ismethod(method)])
