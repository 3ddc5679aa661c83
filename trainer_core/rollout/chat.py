"""Between messages and tokens: the chat template of the model, turn after turn.

The first turn's prompt is the conversation through the template. For a later turn there are two ways. Where the template
only ever adds to what it wrote before, the tokens of the next turn are appended to those already held: the sampled ids stay
as they are, whatever their text would be tokenised to, and the work is that of the new messages. A template that rewrites
what it wrote (one that drops the thinking of earlier turns, say) makes the whole conversation be tokenised again, and
`conversation.reconcile` finds what is left of the sampled ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers.utils import get_json_schema

from trainer_core.rollout.tool_calls import ToolCall, parser_for
from trainer_core.rollout.types import Message, TurnRecord

Tools = Mapping[str, Callable[..., Any]]

_QUESTION: Message = {"role": "user", "content": "question"}
_THINKING = "a thought"


class Chat:
    """Belongs to one tokenizer. `kwargs` are extra arguments of its chat template."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        self._parse = parser_for(template or "")
        self._schemas: dict[Any, dict[str, Any]] = {}
        self._appends: bool | None = None
        self._one_call: bool | None = None
        self._shown: dict[tuple[str, ...], bool] = {}

    def first_prompt(self, prompt: Sequence[Message] | str, tools: Tools) -> list[int]:
        """Token ids that the first turn continues. Text without tools is continued as it is."""
        if isinstance(prompt, str):
            if not tools:
                return self._tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        return self._encode(self._render(prompt, tools, generate=True))

    def next_prompt(
        self,
        turn: TurnRecord,
        answer: Message,
        results: Sequence[Message],
        conversation: Sequence[Message],
        tools: Tools,
    ) -> list[int]:
        """Token ids that the turn after `turn` continues.

        `answer` is what `turn` said, `results` the messages after it, `conversation` all messages, these included.
        """
        alone = len(answer.get("tool_calls", ())) > 1 and self.takes_one_call(tools)
        if turn.output_ids and self.appends(tools):
            end = self._tokenizer.decode(turn.output_ids[-1:])
            # Of an answer only the end matters here, and that is the end of its last call.
            ending = {**answer, "tool_calls": answer["tool_calls"][-1:]} if alone else answer
            added = self._added(ending, results, end, tools)
            if added is not None:
                return turn.prompt_ids + turn.output_ids + self._encode(added)
        if self.takes_one_call(tools):
            conversation = _call_by_call(conversation)
        return self._encode(self._render(conversation, tools, generate=True))

    def read(self, output_ids: Sequence[int], tools: Tools) -> tuple[str, list[ToolCall]]:
        """What the model said: the text outside of calls, and the calls. Without tools everything is text."""
        text = self._tokenizer.decode(output_ids, skip_special_tokens=True)
        if not tools:
            return text, []
        # Some forms are marked by special tokens, so they have to be looked at before those are left out.
        raw = self._tokenizer.decode(output_ids, skip_special_tokens=False)
        if output_ids and output_ids[-1] in self._tokenizer.all_special_ids:
            raw = self._tokenizer.decode(output_ids[:-1], skip_special_tokens=False)
        content, calls = self._parse(raw, tools)
        return (content, calls) if calls else (text, [])

    def appends(self, tools: Tools) -> bool:
        """Whether the template keeps what it wrote: found out once, on a made-up conversation with thinking and a tool."""
        if self._appends is None:
            answer: Message = {
                "role": "assistant",
                "content": f"<think>\n{_THINKING}\n</think>\n\nanswer",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
            }
            result: Message = {"role": "tool", "name": "f", "content": "1"}
            plain = {key: value for key, value in answer.items() if key != "tool_calls"}
            try:
                # Llama's template writes a call without the text around it, so the thinking is looked for in an answer.
                thinks = _THINKING in self._render([_QUESTION, plain], tools)
                asked = self._render([_QUESTION], tools, generate=True)
                invitation = asked[len(self._render([_QUESTION], tools)) :]
                answered = self._render([_QUESTION, answer], tools)
                whole = self._render([_QUESTION, answer, result], tools, generate=True)
            except (TemplateError, TypeError, KeyError):  # no tools in this template
                self._appends = False
            else:
                # One that closes the thinking itself asks for an answer without: then there is no thinking to be kept.
                begins = answered.startswith(asked) or "</think>" in invitation
                kept = whole.startswith(answered) and begins
                seam = len(answered.rstrip())
                joined = self._encode(whole[:seam]) + self._encode(whole[seam:])
                self._appends = kept and thinks and joined == self._encode(whole)
        return self._appends

    def takes_one_call(self, tools: Tools) -> bool:
        """Whether the template refuses an answer with several calls, as Llama 3.1's does; found out once."""
        if self._one_call is None:
            call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            result: Message = {"role": "tool", "name": "f", "content": "1"}

            def writes(count: int) -> bool:
                answer: Message = {"role": "assistant", "content": "", "tool_calls": [call] * count}
                try:
                    self._render([_QUESTION, answer, *[result] * count], tools)
                except (TemplateError, TypeError, KeyError):  # no tools in this template
                    return False
                return True

            self._one_call = writes(1) and not writes(2)
        return self._one_call

    def shows(self, tools: Tools) -> bool:
        """Whether the template tells the model of these tools; found out once for each choice of tools."""
        names = tuple(tools)
        if names not in self._shown:
            prompt = self._render([_QUESTION], tools, generate=True)
            self._shown[names] = all(name in prompt for name in names)
        return self._shown[names]

    def _added(self, answer: Message, results: Sequence[Message], end: str, tools: Tools) -> str | None:
        """The text after an answer's last token; None when the template does not end an answer with that token."""
        before = self._render([_QUESTION, answer], tools)
        stop = len(before.rstrip())
        if not before[:stop].endswith(end):
            return None
        after = self._render([_QUESTION, answer, *results], tools, generate=True)
        if after.startswith(before[:stop]):
            return after[stop:]
        # The last message is written in another way than earlier ones (Qwen3 gives it an empty thought). Behind the point
        # where the same conversation with another answer differs last, the first end of an answer is that of this one.
        other = self._render([_QUESTION, _another(answer), *results], tools, generate=True)
        pairs = enumerate(zip(reversed(after), reversed(other), strict=False))
        same = next((place for place, (one, two) in pairs if one != two), 0)
        at = after.find(end, len(after) - same)
        return None if at < 0 else after[at + len(end) :]

    def _render(self, messages: Sequence[Message], tools: Tools, *, generate: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=[self._schema(tool) for tool in tools.values()] or None,
            add_generation_prompt=generate,
            tokenize=False,
            **self._kwargs,
        )

    def _schema(self, tool: Callable[..., Any]) -> dict[str, Any]:
        key = getattr(tool, "__func__", tool)
        if key not in self._schemas:
            self._schemas[key] = get_json_schema(tool)
        return self._schemas[key]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _call_by_call(conversation: Sequence[Message]) -> list[Message]:
    """The same conversation with a message of its own for each call, followed by the call's result."""
    messages: list[Message] = []
    waiting: list[Message] = []  # calls of an answer that are still to be written
    for message in conversation:
        if message["role"] == "tool" and waiting and messages[-1]["role"] == "tool":
            messages.append(waiting.pop(0))
        messages.append(message)
        calls = message.get("tool_calls", ())
        if len(calls) > 1:
            messages[-1] = {**message, "tool_calls": calls[:1]}
            waiting = [{**message, "content": "", "tool_calls": [call]} for call in calls[1:]]
    return messages


def _another(answer: Message) -> Message:
    """An answer with as many calls that differs from this one up to its end."""
    content = str(answer["content"])
    changed = {**answer, "content": f"{content}{'y' if content.endswith('x') else 'x'}"}
    if calls := answer.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {**call["function"]["arguments"], "another": 1}}}
            for call in calls
        ]
    return changed
