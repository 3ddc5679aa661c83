"""The turns of one rollout: the model speaks, its tools answer, until it calls none or a limit is reached."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trainer_core.rollout.answers import GenerationError
from trainer_core.rollout.client import Policy
from trainer_core.rollout.environments import environment_tools
from trainer_core.rollout.tools import Tool, assistant_message, run_tool_calls
from trainer_core.rollout.types import Message, Rollout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trainer_core.rollout.loop import AsyncRolloutLoop


TOOLS_NOT_SHOWN = (
    "The model's chat template says nothing of the tools ({}), so the model does not know them; describe them and the form of "
    "a call in the prompt, or choose a model whose template has tools."
)


class PromptTooLong(GenerationError):
    """The prompt leaves no room for a completion in the server's context."""


def messages_of(prompt: list[Message] | str) -> list[Message]:
    """The prompt as chat messages, copied."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


async def take_turns(
    loop: AsyncRolloutLoop, policy: Policy, rollout: Rollout, prompt: list[Message] | str, tools: dict[str, Tool]
) -> None:
    """Fill in turns, completion and metrics of a rollout. `prompt` is the row's, which may be plain text.

    Raises GenerationError (PromptTooLong on a first turn without room), ServerUnavailable.
    """
    config, metrics = loop.config, loop.metrics
    left, tool_turns, calls_made, exhausted = config.max_completion_length, 0, 0, False
    begins = prompt if isinstance(prompt, str) and not tools else rollout.prompt
    prompt_ids = loop.chat.first_prompt(begins, tools)
    if not loop.chat.shows(tools):
        loop.monitor.event_once("warning", "tools_not_shown", TOOLS_NOT_SHOWN.format(", ".join(tools)))
    while True:
        max_tokens = _room(loop, len(prompt_ids), left, first=not rollout.turns)
        if max_tokens < 1:
            rollout.turns[-1].finish_reason = "length"
            break
        turn = await loop.client.complete(policy, prompt_ids, max_tokens)
        rollout.turns.append(turn)
        left -= len(turn.output_ids)
        text, calls = loop.chat.read(turn.output_ids, tools)
        answer = assistant_message(text, calls)
        rollout.completion.append(answer)
        exhausted = bool(calls) and tool_turns == config.max_tool_calling_iterations
        if not calls or exhausted or turn.finish_reason == "length" or left < 1:
            break
        results = await run_tool_calls(calls, tools, loop.executor, metrics, config.tool_timeout)
        rollout.completion += results
        tool_turns += 1
        calls_made += len(calls)
        prompt_ids = loop.chat.next_prompt(turn, answer, results, rollout.prompt + rollout.completion, tools)
    if tools:
        metrics.add("tools/call_frequency", float(calls_made))
        metrics.add("tools/loop_exhausted_frac", (float(exhausted), 1.0))
        metrics.add("tools/unknown_name_total", 0.0)


@asynccontextmanager
async def rollout_tools(
    loop: AsyncRolloutLoop, row: dict[str, Any], rollout: Rollout
) -> AsyncIterator[dict[str, Tool]]:
    """The tools of a rollout: those given, and those of its environment, which is reset before and scored after."""
    if loop.environments is None:
        yield loop.tools
        return
    async with loop.environments.lease() as environment:
        observation = await loop.environments.reset(environment, row)
        if observation:
            last = rollout.prompt[-1]
            rollout.prompt[-1] = {**last, "content": f"{last['content']}\n\n{observation}"}
        yield {**loop.tools, **environment_tools(environment)}
        rollout.reward = await loop.environments.reward(environment)


def _room(loop: AsyncRolloutLoop, prompt_tokens: int, left: int, *, first: bool) -> int:
    """Tokens the next turn may generate. Raises PromptTooLong on a first turn without room."""
    context = loop.client.max_model_len
    if first and prompt_tokens >= context:
        raise PromptTooLong(
            f"a prompt of {prompt_tokens} tokens does not fit the server's context of {context}; it was skipped"
        )
    if first and prompt_tokens + left > context:
        loop.metrics.add("rollout/clipped_prompts_total", 1.0)
    return min(left, context - prompt_tokens)
