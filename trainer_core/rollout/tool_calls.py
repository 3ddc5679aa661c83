"""Tool calls in the text of a model: each family of chat templates has a form of its own.

The template says which one a model was trained on, so it chooses the parser. A call that begins in the right form and cannot
be read is a call all the same: the model is told, and it counts as a failure.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Parsed = tuple[str, list["ToolCall"]]
Parser = Callable[[str, Mapping[str, Callable[..., Any]]], Parsed]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
_DEEPSEEK_ENDS = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>")
_FENCED = re.compile(r"\A(\S+)\s*```json\s*(.*?)\s*```\s*\Z", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """A call the model made. `arguments` is None when they could not be read; `raw` is the model's own text."""

    name: str
    arguments: dict[str, Any] | None
    raw: str


def parser_for(template: str) -> Parser:
    """The parser of the form that a chat template teaches; JSON in <tool_call> tags where it teaches none."""
    for marker, parser in _MARKERS:
        if marker in template:
            return parser
    return parse_tagged_json


def parse_tagged_json(text: str, tools: Mapping[str, Callable[..., Any]]) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, SmolLM3."""
    return _tagged(text, lambda raw: _from_json(raw.strip()))


def parse_tagged_functions(text: str, tools: Mapping[str, Callable[..., Any]]) -> Parsed:
    """`<tool_call><function=f><parameter=x>...</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""

    def read(raw: str) -> ToolCall:
        match = _FUNCTION.match(raw)
        if match is None:
            return ToolCall("", None, raw.strip())
        return _from_pairs(match[1].strip(), _PARAMETER.findall(match[2]), raw, tools)

    return _tagged(text, read)


def parse_tagged_pairs(text: str, tools: Mapping[str, Callable[..., Any]]) -> Parsed:
    """`<tool_call>f<arg_key>x</arg_key><arg_value>...</arg_value></tool_call>`: GLM-4.5."""

    def read(raw: str) -> ToolCall:
        name = raw.partition("<arg_key>")[0].strip()
        return _from_pairs(name, [(key.strip(), value) for key, value in _ARGUMENT.findall(raw)], raw, tools)

    return _tagged(text, read)


def parse_bare_json(text: str, tools: Mapping[str, Callable[..., Any]]) -> Parsed:
    """The whole answer is `{"name": ..., "parameters": {...}}`, or several of them with semicolons: Llama 3."""
    tagged = _PYTHON_TAG in text
    before, _, body = text.partition(_PYTHON_TAG) if tagged else ("", "", text)
    body = body.strip()
    if not body.startswith("{"):
        return (before.strip(), [ToolCall("", None, body)]) if tagged else (text, [])
    calls = [_from_json(raw) for raw in _objects(body)]
    if not tagged and not any(call.name for call in calls):
        return text, []  # an answer that happens to be in braces
    return before.strip(), calls


def parse_bracketed(text: str, tools: Mapping[str, Callable[..., Any]]) -> Parsed:
    """`[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]f{...}` for each call: Mistral."""
    content, *parts = text.split(_MISTRAL)
    calls: list[ToolCall] = []
    for part in parts:
        named = _MISTRAL_NAMED.match(part)
        if named is not None:
            arguments = _object(part[named.end() :].strip())
            calls.append(ToolCall(named[1], arguments, part.strip()))
            continue
        listed = _decode(part.strip())
        entries = listed if isinstance(listed, list) else [part.strip()]
        calls += [_from_json(entry if isinstance(entry, str) else json.dumps(entry)) for entry in entries]
    return (content.strip(), calls) if parts else (text, [])


def parse_deepseek(text: str, tools: Mapping[str, Callable[..., Any]]) -> Parsed:
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, in V3 with a kind before and a fence around: DeepSeek."""
    calls: list[ToolCall] = []
    for match in _DEEPSEEK.finditer(text):
        name, body = match[1].strip(), match[2].strip()
        if fenced := _FENCED.match(body):
            name, body = fenced[1], fenced[2]
        calls.append(ToolCall(name, _object(body), match[0]))
    return (_DEEPSEEK_ENDS.sub("", _DEEPSEEK.sub("", text)).strip(), calls) if calls else (text, [])


# The first marker that a template holds decides; those further down also occur in templates of the forms above them.
_MARKERS: tuple[tuple[str, Parser], ...] = (
    ("<parameter=", parse_tagged_functions),
    ("<arg_key>", parse_tagged_pairs),
    (_MISTRAL, parse_bracketed),
    ("<｜tool▁call▁begin｜>", parse_deepseek),
    ("<tool_call>", parse_tagged_json),
    (_PYTHON_TAG, parse_bare_json),
    ('"parameters": dictionary', parse_bare_json),
)


def _tagged(text: str, read: Callable[[str], ToolCall]) -> Parsed:
    calls = [read(match[1]) for match in _TAGGED.finditer(text)]
    return (_TAGGED.sub("", text).strip() if calls else text), calls


def _from_json(raw: str) -> ToolCall:
    call = _decode(raw)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", None, raw)
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models quote the object once more
        arguments = _decode(arguments)
    return ToolCall(call["name"], arguments if isinstance(arguments, dict) else None, raw)


def _from_pairs(name: str, pairs: list[tuple[str, str]], raw: str, tools: Mapping[str, Callable[..., Any]]) -> ToolCall:
    """Values are text in these forms: JSON where it can be read so, unless the tool wants text."""
    wanted = inspect.signature(tools[name]).parameters if name in tools else {}
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        text_wanted = key in wanted and wanted[key].annotation in (str, "str")
        decoded = None if text_wanted else _decode(value)
        arguments[key] = value if decoded is None and value.strip() != "null" else decoded
    return ToolCall(name, arguments, raw.strip())


def _objects(text: str) -> Iterator[str]:
    """The JSON objects of a text, one after another; what cannot be read is one piece."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            yield text[at:]
            return
        yield text[at:end]
        at = end
        while at < len(text) and text[at] in "; \n\t":
            at += 1


def _object(text: str) -> dict[str, Any] | None:
    value = _decode(text)
    return value if isinstance(value, dict) else None


def _decode(text: str) -> Any:
    """The JSON value, or None."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
