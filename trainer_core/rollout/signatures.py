"""Whether what a user wrote can be called the way it will be: found out before a model is loaded. Errors are one sentence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainer_core.rewards import RewardFunction, reward_name
from trainer_core.rollout.environments import RESERVED
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.tools import Tool

GIVEN = ("prompts", "completions", "completion_ids")


def check_described(name: str, tool: Tool) -> None:
    """The model sees a tool as a JSON schema made of its type hints and docstring. Raises TypeError where it cannot be made."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise TypeError(f"the tool {name} cannot be described to the model: {' '.join(str(error).split())}") from error


def check_rewards(functions: Sequence[RewardFunction], columns: Iterable[str]) -> None:
    """Raises TypeError for one that cannot take what reward functions are called with: `GIVEN`, and the dataset's columns."""
    names = [*GIVEN, *(column for column in columns if column != "prompt")]
    for function in functions:
        if (problem := _refused(function, names)) is not None:
            raise TypeError(
                f"reward function {reward_name(function)} cannot be called with {', '.join(names)} ({problem}); take what it "
                "does not need as **columns"
            )


def check_environment(factory: Callable[[], Any] | None, columns: Iterable[str]) -> None:
    """Raises TypeError for a class whose `reset` cannot take a row, or whose methods cannot be described to the model.

    What another factory makes is not known before it has made it.
    """
    if factory is not None and not callable(factory):
        raise TypeError(
            f"environment_factory is a {type(factory).__name__}; a class, or a function that makes one, is needed"
        )
    made = _class_of(factory)
    if made is None:
        return
    if not hasattr(made, "reset"):
        raise TypeError(f"environment {made.__name__} has no reset; it opens the environment for a row of the dataset")
    columns = list(columns)
    if (problem := _refused(functools.partial(made.reset, None), columns)) is not None:
        raise TypeError(
            f"reset of environment {made.__name__} cannot be called with the dataset's columns {', '.join(columns)} "
            f"({problem}); take what it does not need as **row"
        )
    for name, method in inspect.getmembers(made, inspect.isfunction):
        if not name.startswith("_") and name not in RESERVED:
            check_described(f"{made.__name__}.{name}", method)


def check_scored(functions: Sequence[RewardFunction], factory: Callable[[], Any] | None, loop_cls: Any) -> None:
    """Raises TypeError for a loop that is none, ValueError where nothing scores: no function, environment or own generation."""
    if not (inspect.isclass(loop_cls) and issubclass(loop_cls, AsyncRolloutLoop)):
        raise TypeError(f"loop_cls is {loop_cls!r}; a subclass of AsyncRolloutLoop is needed")
    made = _class_of(factory)
    may_score = factory is not None and (made is None or hasattr(made, "get_reward"))
    if not functions and not may_score and loop_cls.generate_one is AsyncRolloutLoop.generate_one:
        raise ValueError(
            "nothing scores the rollouts; give reward_funcs, an environment with get_reward, or a loop_cls whose generate_one "
            "sets rewards"
        )


def _class_of(factory: Callable[[], Any] | None) -> Any:
    """The class that a factory is, or is a partial of; None where what it makes is not known."""
    made = factory.func if isinstance(factory, functools.partial) else factory
    return made if inspect.isclass(made) else None


def _refused(function: Callable[..., Any], names: Iterable[str]) -> str | None:
    """What is wrong with calling a function with these keyword arguments; None where nothing is, or nobody knows."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return None
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return None
