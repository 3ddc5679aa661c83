"""Every form of tool calls, by the text that models of the family write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_core.rollout import chat_templates
from trainer_core.rollout import tool_calls
from trainer_core.rollout.tool_calls import Parser, parser_for


def look(place: str, depth: int) -> str:
    """Text and number."""
    return place * depth


TOOLS = {"look": look}
WANTED = [("look", {"place": "7", "depth": 2}), ("look", {"place": "a b", "depth": 3})]
TEXTS: dict[Parser, str] = {
    tool_calls.parse_tagged_json: (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"place": "7", "depth": 2}}\n</tool_call>\n'
        '<tool_call>{"name": "look", "arguments": "{\\"place\\": \\"a b\\", \\"depth\\": 3}"}</tool_call>'
    ),
    tool_calls.parse_tagged_functions: (
        "I look.\n<tool_call>\n<function=look>\n<parameter=place>\n7\n</parameter>\n<parameter=depth>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=look>\n<parameter=place>\na b\n</parameter>\n<parameter=depth>\n3\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
    tool_calls.parse_tagged_pairs: (
        "I look.\n<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>7</arg_value>\n<arg_key>depth</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>a b</arg_value>\n"
        "<arg_key>depth</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    tool_calls.parse_bare_json: (
        'I look.<|python_tag|>{"name": "look", "parameters": {"place": "7", "depth": 2}}; '
        '{"name": "look", "parameters": {"place": "a b", "depth": 3}}'
    ),
    tool_calls.parse_bracketed: (
        'I look.[TOOL_CALLS] [{"name": "look", "arguments": {"place": "7", "depth": 2}}, '
        '{"name": "look", "arguments": {"place": "a b", "depth": 3}}]'
    ),
    tool_calls.parse_deepseek: (
        'I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"place": "7", "depth": 2}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"place": "a b", "depth": 3}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
}


@pytest.mark.parametrize("parser", TEXTS, ids=lambda parser: parser.__name__)
def test_text_and_calls(parser: Parser) -> None:
    content, calls = parser(TEXTS[parser], TOOLS)
    assert content == "I look."
    assert [(call.name, call.arguments) for call in calls] == WANTED
    assert parser(" no call ", TOOLS) == (" no call ", [])


def test_mistral_names_before_arguments() -> None:
    text = '[TOOL_CALLS]look{"place": "7", "depth": 2}[TOOL_CALLS]look[ARGS]{"place": "a b", "depth": 3}'
    assert [(call.name, call.arguments) for call in tool_calls.parse_bracketed(text, TOOLS)[1]] == WANTED


@pytest.mark.parametrize(
    "parser, text",
    [
        (tool_calls.parse_tagged_json, "<tool_call>nonsense</tool_call>"),
        (tool_calls.parse_tagged_json, "<tool_call>[1]</tool_call>"),
        (tool_calls.parse_tagged_json, '<tool_call>{"name": 3}</tool_call>'),
        (tool_calls.parse_tagged_json, '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
        (tool_calls.parse_tagged_functions, "<tool_call>look(7)</tool_call>"),
        (tool_calls.parse_bare_json, "<|python_tag|>look(7)"),
        (tool_calls.parse_bare_json, '<|python_tag|>{"name": "look", "parameters": '),
        (tool_calls.parse_bracketed, "[TOOL_CALLS] look(7)"),
        (tool_calls.parse_bracketed, '[TOOL_CALLS]look{"place": '),
        (tool_calls.parse_deepseek, "<｜tool▁call▁begin｜>look<｜tool▁sep｜>7<｜tool▁call▁end｜>"),
    ],
)
def test_what_cannot_be_read_is_a_call_without_arguments(parser: Parser, text: str) -> None:
    (call,) = parser(text, TOOLS)[1]
    assert call.arguments is None


def test_an_answer_in_braces_is_no_call() -> None:
    for text in ('{"answer": 3}', "{x}", "3 {}"):
        assert tool_calls.parse_bare_json(text, TOOLS) == (text, [])


def test_the_template_chooses() -> None:
    assert parser_for(chat_templates.HERMES) is tool_calls.parse_tagged_json
    assert parser_for(chat_templates.QWEN3) is tool_calls.parse_tagged_json
    assert parser_for(chat_templates.LLAMA3) is tool_calls.parse_bare_json
    assert parser_for("<tool_call>\n<function=f>\n<parameter=x>") is tool_calls.parse_tagged_functions
    assert parser_for("<tool_call>f<arg_key>") is tool_calls.parse_tagged_pairs
    assert parser_for("{{ '[TOOL_CALLS]' }}") is tool_calls.parse_bracketed
    assert parser_for("<｜tool▁call▁begin｜>") is tool_calls.parse_deepseek
    assert parser_for("plain") is tool_calls.parse_tagged_json


pieces = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<function=", "<parameter=a>", "</parameter>", "<arg_key>", "[TOOL_CALLS]", "[", "]",
         "<|python_tag|>", "{", "}", '"name"', ":", '"f"', ";", "f", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json",
         "\n", "1"]
    ),
    max_size=14,
)  # fmt: skip


@given(pieces, st.sampled_from(list(TEXTS)))
def test_no_text_breaks_a_parser(text: list[str], parser: Parser) -> None:
    content, calls = parser("".join(text), TOOLS)
    assert isinstance(content, str)
    for call in calls:
        arguments: Any = call.arguments
        assert arguments is None or isinstance(arguments, dict)
