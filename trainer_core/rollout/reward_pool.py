"""Scores groups in killable processes. What goes wrong in a reward function is data: counted, reported, never raised."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from trainer_core.rewards import RewardFunction, reward_names
from trainer_core.rollout.reward_process import Zygote, encode, read_message

MAX_PROCESSES = 16


@dataclass
class Scores:
    """Rewards of one function for one group. `values` is None when nothing could be scored; `text` then says why.

    After a timeout the completions are scored one by one: then `unscorable` says for which of them that failed, too.
    """

    function: str
    values: list[float | None] | None
    failure: Literal["error", "timeout"] | None = None
    text: str = ""
    traceback: str = ""
    unscorable: list[bool] | None = None

    def failed(self, size: int) -> list[bool]:
        """For each of `size` completions whether the function failed on it."""
        return self.unscorable or [self.failure is not None] * size


class _Process:
    """One reward process and its stream."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self.reader, self.writer = pid, reader, writer

    async def call(self, index: int, arguments: dict[str, Any]) -> tuple[str, Any]:
        self.writer.write(encode((index, arguments)))
        await self.writer.drain()
        return await read_message(self.reader)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.writer.close()


class RewardPool:
    """A process for each call under way, up to the number of cores; async functions mostly wait, so they get more.

    The zygote must have been forked before the event loop was started.
    """

    def __init__(self, zygote: Zygote, functions: Sequence[RewardFunction], timeout: float) -> None:
        self.names = reward_names(functions)
        self.timeout = timeout
        waits = any(asyncio.iscoroutinefunction(function) for function in functions)
        self.size = MAX_PROCESSES if waits else min(MAX_PROCESSES, max(2, os.cpu_count() or 1))
        self._zygote = zygote
        self._free = asyncio.Semaphore(self.size)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def score(self, arguments: dict[str, Any]) -> list[Scores]:
        """One `Scores` for each function. `arguments`: prompts, completions, completion_ids and the row's columns."""
        return list(await asyncio.gather(*(self._score_group(index, arguments) for index in range(len(self.names)))))

    def close(self) -> None:
        for process in self._all:
            process.kill()
        self._all.clear()
        self._zygote.close()

    async def _score_group(self, index: int, arguments: dict[str, Any]) -> Scores:
        """Score all completions in one call. When it hangs, in a call each, so that one completion costs no other its score."""
        scores = await self._score(index, arguments)
        size = len(arguments["completions"])
        if scores.failure != "timeout" or size == 1:
            return scores
        # every argument is a list with a value for each completion
        alone = [{name: [values[place]] for name, values in arguments.items()} for place in range(size)]
        singles = await asyncio.gather(*(self._score(index, single) for single in alone))
        scores.unscorable = [single.failure is not None for single in singles]
        lost = sum(scores.unscorable)
        if lost < size:
            scores.values = [single.values[0] if single.values else None for single in singles]
            scores.text += f"; scored one by one, {lost} of {size} completions failed"
        return scores

    async def _score(self, index: int, arguments: dict[str, Any]) -> Scores:
        name = self.names[index]
        async with self._free:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(self.timeout):
                    kind, result = await process.call(index, arguments)
            except TimeoutError:
                self._discard(process)
                return Scores(name, None, "timeout", f"{name} took longer than reward_timeout ({self.timeout:g} s)")
            except (asyncio.IncompleteReadError, ConnectionError):
                self._discard(process)
                return Scores(name, None, "error", f"{name} ended its process (a crash, or out of memory)")
            except asyncio.CancelledError:
                self._discard(process)
                raise
            self._idle.append(process)
        if kind == "error":
            return Scores(name, None, "error", *result)
        return Scores(name, result)

    async def _start(self) -> _Process:
        pid, connection = self._zygote.fork()
        process = _Process(pid, *await asyncio.open_connection(sock=connection, limit=2**26))
        self._all.add(process)
        return process

    def _discard(self, process: _Process) -> None:
        process.kill()
        self._all.discard(process)
