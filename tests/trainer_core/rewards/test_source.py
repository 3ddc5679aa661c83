import pytest

from trainer_core.rewards.source import function_name, validate_source


@pytest.mark.parametrize(
    "source, line, text",
    [
        ("def reward(completions)\n    return []", 1, "expected ':'"),
        ("x = 1\n\ny = (", 3, "never closed"),
        ("def reward(completions):\nreturn []", 2, "expected an indented block"),
        ("x = 1", 0, "defines no function"),
        ("", 0, "defines no function"),
        ("import math\nreward = lambda completions: [1.0]", 2, "reward is a lambda; write def reward("),
        ("\ndef _reward(completions): ...", 2, "_reward begins with an underscore"),
        ("class A:\n    def reward(self, completions): ...", 0, "defines no function"),
        ("def reward(answer): ...", 1, "reward(answer) takes no completions"),
        ("def reward(): ...", 1, "reward() takes no completions"),
        ("def reward(completions, /, **columns): ...", 1, "positional-only"),
        ("x = '\0'", 0, ""),
    ],
)
def test_problems_have_a_line_and_a_sentence(source: str, line: int, text: str) -> None:
    problem = validate_source(source)[0]
    assert problem.line == line
    assert text in problem.text


@pytest.mark.parametrize(
    "source",
    [
        "def reward(completions, **columns): ...",
        "def reward(**columns): ...",
        "async def reward(completion_ids, answer): ...",
        "def _helper(x): ...\ndef reward(prompts, completions): ...",
        "def reward(*, completions): ...",
    ],
)
def test_usable_sources(source: str) -> None:
    assert validate_source(source) == []
    assert function_name(source) == "reward"


def test_the_last_public_function_is_the_reward() -> None:
    assert function_name("def helper(x): ...\ndef score(completions): ...\ndef _later(x): ...") == "score"
    with pytest.raises(ValueError, match="defines no function"):
        function_name("x = 1")
