"""Prompts and completions as people read them. What a run stored may be of any shape, and nothing here raises on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A tool call: the tool's name, and its arguments as indented JSON, or as they came when they are none."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Shown:
    """A message. `hidden` characters of its text are left out of `text`."""

    role: str
    text: str
    hidden: int = 0
    name: str = ""
    calls: list[Call] = field(default_factory=list)


def messages(value: Any, role: str, limit: int | None = None) -> list[Shown]:
    """A prompt or completion: chat messages, or a text, which gets `role`. Each text is cut after `limit` characters."""
    if not isinstance(value, list):
        value = [{"role": role, "content": value}]
    shown = []
    for item in value:
        message = item if isinstance(item, dict) else {"role": role, "content": item}
        text = _content(message.get("content"))
        if thinking := message.get("reasoning_content"):
            text = f"{_content(thinking)}\n\n{text}"
        kept = text if limit is None or len(text) <= limit else text[:limit]
        calls = message.get("tool_calls")
        shown.append(Shown(
            str(message.get("role") or role), kept, len(text) - len(kept), str(message.get("name") or ""),
            [_call(call) for call in calls] if isinstance(calls, list) else [],
        ))  # fmt: skip
    return shown


def searchable(data: dict[str, Any]) -> str:
    """Everything that was said in a rollout, casefolded."""
    said = messages(data.get("prompt"), "user") + messages(data.get("completion"), "assistant")
    parts = [part for one in said for part in (one.text, *(f"{call.name} {call.arguments}" for call in one.calls))]
    return "\n".join(part for part in parts if part).casefold()


def _content(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):  # parts, as multimodal templates have them
        return "\n".join(
            str(part["text"]) if isinstance(part, dict) and "text" in part else _as_json(part) for part in value
        )
    return _as_json(value)


def _call(value: Any) -> Call:
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict):
        return Call("", _as_json(function))
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Call(str(function.get("name") or ""), arguments)
    return Call(str(function.get("name") or ""), _as_json(arguments))


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)
