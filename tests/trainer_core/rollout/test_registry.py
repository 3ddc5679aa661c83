"""Tools and environments by name: what a run may name, what it is told otherwise, and what comes with Offbeat."""

from __future__ import annotations

import pickle
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from transformers.utils import get_json_schema

from trainer_core.rollout import registry
from trainer_core.rollout.builtin_agents import GuessNumber, calculator
from trainer_core.rollout.environments import environment_tools
from trainer_core.rollout.registry import ALLOWED_MODULES, load_environment, load_tools
from trainer_core.spec import RunSpec

HERE = __name__
NOT_CALLABLE = 3


def shout(text: str) -> str:
    """Shouts.

    Args:
        text: What.
    """
    return text.upper()


class Room:
    """An environment with an option."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def reset(self, **row: Any) -> None: ...


def test_what_comes_with_offbeat() -> None:
    assert load_tools(["calculator"]) == [calculator]
    factory = load_environment("guess_number", {"high": 3})
    assert factory is not None
    made = pickle.loads(pickle.dumps(factory))()
    assert made.reset(number=2) == "Find the number from 0 to 3."
    assert load_environment("openenv", {"base_url": "http://h"}) is not None
    assert load_environment("", {}) is None
    for tool in (calculator, *environment_tools(made).values()):
        assert get_json_schema(tool)["function"]["parameters"]["properties"]


def test_modules_that_the_operator_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_MODULES, "other, tests.trainer_core")
    assert load_tools([f"{HERE}:shout", "calculator"]) == [shout, calculator]
    factory = load_environment(f"{HERE}:Room", {"size": 4})
    assert factory is not None
    assert factory().size == 4


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("loud", f"{HERE}:shout", "offbeat.tools")]
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for point in points if point.group == group])
    assert load_tools(["loud"]) == [shout]
    with pytest.raises(ValueError, match="no environment 'loud' on the training host; there are guess_number, openenv"):
        load_environment("loud", {})


@pytest.mark.parametrize(
    "name, allowed, text",
    [
        ("abacus", "", "there is no tool 'abacus' on the training host; there are calculator, and module:name"),
        ("os:system", "", r"module os, which is not allowed .* OFFBEAT_TOOL_MODULES \(now empty\)"),
        ("os.path:join", "o,osx", r"not allowed on the training host; .*\(now o, osx\)"),
        (f"{HERE}:whisper", "tests", "has no 'whisper'"),
        (f"{HERE}:", "tests", "has no 'name behind the colon'"),
        (f"{HERE}:NOT_CALLABLE", "tests", "is a int; a function is needed"),
        ("tests.nowhere:f", "tests", "module tests.nowhere cannot be imported"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, allowed: str, text: str
) -> None:
    monkeypatch.setenv(ALLOWED_MODULES, allowed)
    with pytest.raises(ValueError, match=text) as caught:
        load_tools([name])
    assert "\n" not in str(caught.value)


def test_options_must_fit() -> None:
    with pytest.raises(ValueError, match=r"'guess_number' does not take the options \{'colour': 'red'\}: .*colour"):
        load_environment("guess_number", {"colour": "red"})
    with pytest.raises(ValueError, match=r"'openenv' does not take the options \{\}: missing .*base_url"):
        load_environment("openenv", {})
    with pytest.raises(ValueError, match=r"environment options are given \(high\), but no environment"):
        load_environment("", {"high": 3})


@pytest.mark.parametrize(
    "expression, value",
    [
        ("(3 + 4) * 2", "14"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("-2 ** 2", "-4"),
        ("17 // 5 + 17 % 5", "5"),
        ("0.5 + 1", "1.5"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "x + 1", "'a' * 3", "1 if 2 else 3", "9 ** 999", "10 ** 99 * 10 ** 99 * 10 ** 99 * 10 ** 99",
     "(-8) ** 0.5", "1 / 0", "True + 1", "1 +", "1" * 300, "[1]"],
)  # fmt: skip
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError, SyntaxError)):
        calculator(expression)


def test_the_number_game() -> None:
    game = GuessNumber()
    for number, column in ((7, "number"), (4, "answer")):
        game.reset(**{column: str(number)}, prompt="p")
        assert [game.guess(number - 1), game.guess(number + 1), game.guess(number)] == ["higher", "lower", "found"]
        assert game.get_reward() == pytest.approx(0.7)
    for row, text in (({"answer": "x"}, "needs a whole number"), ({"number": 11}, "from 0 to 9; a row has 11")):
        with pytest.raises(ValueError, match=text):
            game.reset(**row)


def test_a_spec_names_them() -> None:
    spec = RunSpec.from_yaml(
        "agent: {tools: [calculator], environment: guess_number, environment_options: {high: 3}}\nrewards: []"
    )
    assert RunSpec.from_yaml(spec.to_yaml()) == spec
    for text, problem in (
        ("rewards: []", "list at least one reward, or name an environment"),
        ("agent: {environment_options: {high: 3}}", "agent.environment is empty; name an environment"),
    ):
        with pytest.raises(ValueError, match=problem):
            RunSpec.from_yaml(text)
