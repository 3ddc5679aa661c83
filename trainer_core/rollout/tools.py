"""Tools: the model calls them by name, the results go back as messages.

Sync tools run in threads, async ones are awaited. The calls of one assistant turn run in the order the model made them.
Whatever goes wrong (an unknown name, arguments that are no JSON object, an exception, a call that does not end) is told to the
model and counted.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from trainer_core.rollout.tool_calls import ToolCall
from trainer_core.rollout.types import Message

Tool = Callable[..., Any]


class Metrics(Protocol):
    """Where values of the metric table go."""

    def add(self, name: str, value: float | tuple[float, float]) -> None: ...


class ToolThreads(Executor):
    """A thread for each call. A rollout makes one call at a time, so there are at most as many as rollouts in flight.

    A pool of fixed size would be used up by calls that never end; here they only keep their own thread, which does not keep
    the process from exiting.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            # whatever a tool raises belongs to the one who waits for it
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name="tool", daemon=True).start()
        return future


def tool_table(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name. Raises TypeError for one without a name, ValueError for a name that two share."""
    table: dict[str, Tool] = {}
    for tool in tools:
        name = getattr(tool, "__name__", None)
        if name is None:
            raise TypeError(f"the tool {tool!r} has no __name__; the model calls a tool by its name, so use a function")
        if name in table:
            raise ValueError(f"two tools are named {name!r}; the model calls a tool by its name, so each needs its own")
        table[name] = tool
    return table


def assistant_message(text: str, calls: Sequence[ToolCall]) -> Message:
    """The assistant's message in the form that chat templates know."""
    if not calls:
        return {"role": "assistant", "content": text}
    described = [
        {"type": "function", "function": {"name": call.name or "unreadable", "arguments": call.arguments or {}}}
        for call in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": described}


async def run_tool_calls(
    calls: Sequence[ToolCall], table: Mapping[str, Tool], executor: Executor, metrics: Metrics, timeout: float
) -> list[Message]:
    """One tool message for each call, in order. A call may take `timeout` seconds."""
    metrics.add("tools/parallel_calls_mean", float(len(calls)))
    return [await _run_call(call, table, executor, metrics, timeout) for call in calls]


async def _run_call(
    call: ToolCall, table: Mapping[str, Tool], executor: Executor, metrics: Metrics, timeout: float
) -> Message:
    tool = table.get(call.name)
    if tool is None or call.arguments is None:
        if call.name and tool is None:
            metrics.add("tools/unknown_name_total", 1.0)
            problem = f"there is no tool {call.name!r}; the tools are {', '.join(sorted(table))}"
        else:
            problem = f"the call is not a JSON object with 'name' and 'arguments': {call.raw[:200]}"
        metrics.add("tools/failure_frequency", (1.0, 1.0))
        return {"role": "tool", "name": call.name or "unreadable", "content": f"Error: {problem}"}
    metrics.add(f"tools/{call.name}/call_total", 1.0)
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout) as deadline:
            content, failed = _as_text(await _invoke(tool, call.arguments, executor)), False
    # a tool's exception is an answer to the model, not a fault of the run
    except Exception as error:  # noqa: BLE001
        late = deadline.expired() and isinstance(error, TimeoutError)
        problem = f"the call took longer than {timeout:g} s" if late else f"{type(error).__name__}: {error}"
        content, failed = f"Error: {problem}", True
    elapsed = time.perf_counter() - started
    metrics.add("tools/failure_frequency", (float(failed), 1.0))
    metrics.add(f"tools/{call.name}/failure_total", float(failed))
    metrics.add("tools/latency_s", elapsed)
    metrics.add(f"tools/{call.name}/latency_s", elapsed)
    return {"role": "tool", "name": call.name, "content": content}


async def _invoke(tool: Tool, arguments: dict[str, Any], executor: Executor) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    result = await asyncio.get_running_loop().run_in_executor(executor, lambda: tool(**arguments))
    return await result if inspect.isawaitable(result) else result


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
