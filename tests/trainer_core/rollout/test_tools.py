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
from trainer_core.rollout.tools import ToolCall, assistant_message, parse_tool_calls, run_tool_calls, tool_table

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
        messages = asyncio.run(run_tool_calls(calls, tool_table([slow, quick, broken]), executor, metrics))
    buffer = MetricBuffer()
    for name, values in metrics.take().items():
        assert describe(name) is not None
        for value in values:
            buffer.add(name, value)
    return messages, buffer.flush()


def test_parse() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "slow", "arguments": {"number": 1}}\n</tool_call>\n<tool_call>{"name": "quick"}'
    content, calls = parse_tool_calls(text)
    assert content == "Let me see."
    assert [(call.name, call.arguments) for call in calls] == [("slow", {"number": 1}), ("quick", {})]
    assert parse_tool_calls(" no call ") == (" no call ", [])
    assert parse_tool_calls('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>')[1][0].arguments == {
        "a": 2
    }
    for bad in ("<tool_call>nonsense</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 3}</tool_call>'):
        assert parse_tool_calls(bad)[1][0].arguments is None
    assert parse_tool_calls('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')[1][0].arguments is None


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

    def __init__(self) -> None:
        Counter.made += 1

    def reset(self, start: int, **row: Any) -> str:
        self.value = start
        return f"The counter is at {start}."

    async def add(self, number: int) -> int:
        self.value += number
        return self.value

    def get_reward(self) -> float:
        return self.value / 10

    def _hidden(self) -> None: ...


def test_environments_are_reset_used_again_and_thrown_away_when_they_fail() -> None:
    metrics = MetricValues()

    async def use() -> None:
        with ThreadPoolExecutor(2) as executor:
            pool = EnvironmentPool(Counter, executor, metrics)
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
            assert Counter.made == 2

    asyncio.run(use())
    assert set(metrics.take()) == {"env/reset_s", "env/reward_s"}
