"""The tool loop: order, failures that the model is told about, and environments."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from trainer_core.metrics import MetricBuffer, describe
from trainer_core.rollout.environments import EnvironmentPool, environment_tools
from trainer_core.rollout.monitor import MetricValues
from trainer_core.rollout.tools import ToolCall, ToolThreads, assistant_message, run_tool_calls, tool_table

ORDER: list[int] = []


def slow(number: int) -> str:
    time.sleep(0.02)
    ORDER.append(number)
    return f"slow {number}"


async def quick(number: int) -> dict[str, int]:
    ORDER.append(number)
    return {"number": number}


def broken() -> str:
    raise RuntimeError("no luck")


def run(*calls: ToolCall) -> tuple[list[dict[str, Any]], dict[str, float]]:
    metrics = MetricValues()
    with ThreadPoolExecutor(2) as executor:
        messages = asyncio.run(run_tool_calls(calls, tool_table([slow, quick, broken]), executor, metrics, 5.0))
    buffer = MetricBuffer()
    for name, values in metrics.take().items():
        assert describe(name) is not None
        for value in values:
            buffer.add(name, value)
    return messages, buffer.flush()


def test_calls_run_in_the_models_order() -> None:
    ORDER.clear()
    messages, metrics = run(
        ToolCall("slow", {"number": 1}, ""), ToolCall("quick", {"number": 2}, ""), ToolCall("slow", {"number": 3}, "")
    )
    assert ORDER == [1, 2, 3]
    assert [message["content"] for message in messages] == ["slow 1", '{"number": 2}', "slow 3"]
    assert [message["name"] for message in messages] == ["slow", "quick", "slow"]
    assert metrics["tools/slow/call_total"] == 2
    assert metrics["tools/failure_frequency"] == 0
    assert metrics["tools/slow/latency_s"] >= 0.02


def test_failures_are_fed_back_and_counted() -> None:
    messages, metrics = run(
        ToolCall("nothing", {}, ""),
        ToolCall("broken", {}, ""),
        ToolCall("slow", {"wrong": 1}, ""),
        ToolCall("", None, "raw text"),
    )
    contents = [message["content"] for message in messages]
    assert contents[0] == "Error: there is no tool 'nothing'; the tools are broken, quick, slow"
    assert contents[1] == "Error: RuntimeError: no luck"
    assert "unexpected keyword argument 'wrong'" in contents[2]
    assert "not a JSON object" in contents[3]
    assert "raw text" in contents[3]
    assert metrics["tools/unknown_name_total"] == 1
    assert metrics["tools/failure_frequency"] == 1
    assert metrics["tools/broken/failure_total"] == 1


def never() -> str:
    time.sleep(1000)
    return "never"


async def never_async() -> None:
    await asyncio.sleep(1000)


def test_calls_that_do_not_end_are_given_up_and_hold_up_nobody() -> None:
    """More of them than a pool would have threads; the tool that works is asked at the same time."""
    metrics = MetricValues()
    table = tool_table([never, never_async, slow])

    async def rollouts() -> list[list[dict[str, Any]]]:
        calls = [[ToolCall("never", {}, "")]] * 6 + [
            [ToolCall("never_async", {}, "")],
            [ToolCall("slow", {"number": 1}, "")],
        ]
        return await asyncio.gather(*(run_tool_calls(call, table, ToolThreads(), metrics, 0.5) for call in calls))

    started = time.monotonic()
    answers = [messages[0]["content"] for messages in asyncio.run(rollouts())]
    assert time.monotonic() - started < 3
    assert answers == ["Error: the call took longer than 0.5 s"] * 7 + ["slow 1"]
    values = metrics.take()
    assert sum(values["tools/never/failure_total"]) == 6  # type: ignore[arg-type]
    assert values["tools/slow/failure_total"] == [0.0]


def own_timeout() -> None:
    raise TimeoutError("the host did not answer")


def test_a_tools_own_timeout_is_told_as_its_own() -> None:
    metrics = MetricValues()
    call = run_tool_calls([ToolCall("own_timeout", {}, "")], tool_table([own_timeout]), ToolThreads(), metrics, 5.0)
    assert asyncio.run(call)[0]["content"] == "Error: TimeoutError: the host did not answer"


def test_the_assistants_message_has_the_form_of_chat_templates() -> None:
    message = assistant_message("x", [ToolCall("f", {"a": 1}, "")])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert assistant_message("x", []) == {"role": "assistant", "content": "x"}


def test_names_are_checked() -> None:
    import functools

    with pytest.raises(TypeError, match="has no __name__"):
        tool_table([functools.partial(slow, 1)])
    with pytest.raises(ValueError, match="two tools are named 'slow'"):
        tool_table([slow, slow])


class Counter:
    """An environment that counts; `made` counts environments."""

    made = 0
    closed = 0

    def __init__(self) -> None:
        Counter.made += 1

    def close(self) -> None:
        Counter.closed += 1

    def reset(self, start: int, **row: Any) -> str:
        self.value = start
        return f"The counter is at {start}."

    async def add(self, number: int) -> int:
        self.value += number
        return self.value

    def get_reward(self) -> float:
        return self.value / 10

    def _hidden(self) -> None: ...


class Lazy:
    """Everything that may be asked of it gives something to await, and nothing of it is declared async."""

    def __call__(self) -> Any:
        async def make() -> Lazy:
            return self

        return make()

    def reset(self, **row: Any) -> Any:
        async def begin() -> str:
            return "begun"

        return begin()

    @property
    def connection(self) -> Any:
        raise RuntimeError("a property was looked at")

    def get_reward(self) -> Any:
        async def score() -> float:
            return 0.5

        return score()


def test_what_an_environment_gives_is_awaited_and_its_properties_are_left_alone() -> None:
    async def use() -> None:
        pool = EnvironmentPool(Lazy(), ToolThreads(), MetricValues(), 5.0)
        async with pool.lease() as environment:
            assert isinstance(environment, Lazy)
            assert await pool.reset(environment, {}) == "begun"
            assert environment_tools(environment) == {}
            assert await pool.reward(environment) == 0.5

    asyncio.run(use())


def test_environments_are_reset_used_again_and_thrown_away_when_they_fail() -> None:
    metrics = MetricValues()

    async def use() -> None:
        with ThreadPoolExecutor(2) as executor:
            pool = EnvironmentPool(Counter, executor, metrics, 5.0)
            async with pool.lease() as first:
                assert await pool.reset(first, {"start": 3, "prompt": "p"}) == "The counter is at 3."
                assert list(environment_tools(first)) == ["add"]
                assert await environment_tools(first)["add"](number=4) == 7
                assert await pool.reward(first) == 0.7
            with suppress(RuntimeError):
                async with pool.lease() as again:
                    assert again is first
                    raise RuntimeError
            async with pool.lease() as other:
                assert other is not first
            assert (Counter.made, Counter.closed) == (2, 1)
            await pool.close()
            assert Counter.closed == 2

    asyncio.run(use())
    assert set(metrics.take()) == {"env/reset_s", "env/reward_s"}
