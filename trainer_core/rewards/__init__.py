"""Reward functions: the built-in ones, and loading of those a run names.

A reward function is called as f(prompts, completions, completion_ids, **columns), each a list with one entry for each
completion of a group, and returns one number or None (unscorable) for each; it may be async. Light to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_core.rewards.builtin import (
    HttpReward,
    SoftOverlongPunishment,
    accuracy_reward,
    exact_match,
    http_reward,
    last_number_match,
    reasoning_gym_score,
    soft_overlong_punishment,
    think_format_reward,
)

if TYPE_CHECKING:
    from trainer_core.spec import RewardSpec

RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Builtin:
    """A built-in reward: the function, what it does, and the dataset columns it needs (any one of each group)."""

    function: RewardFunction
    description: str
    columns: tuple[tuple[str, ...], ...] = ()


BUILTINS: dict[str, Builtin] = {
    "last_number_match": Builtin(
        last_number_match, "1 where the last number of the completion equals the answer.", (("answer",),)
    ),
    "exact_match": Builtin(exact_match, "1 where the completion is exactly the answer.", (("answer",),)),
    "accuracy_reward": Builtin(
        accuracy_reward, "1 where math-verify finds completion and solution equal.", (("solution", "answer"),)
    ),
    "think_format_reward": Builtin(
        think_format_reward, "1 where the completion is one <think> block followed by an answer."
    ),
    "soft_overlong_punishment": Builtin(
        soft_overlong_punishment, "0 for completions of moderate length, falling to -1 at the token limit."
    ),
    "reasoning_gym_score": Builtin(
        reasoning_gym_score,
        "reasoning-gym's own score of the answer, with partial credit.",
        (("reasoning_gym_task",), ("reasoning_gym_entry",)),
    ),
    "http_reward": Builtin(
        http_reward, "Scores from a model behind HTTP, at the rows' reward_url.", (("reward_url",),)
    ),
}


def reward_name(function: RewardFunction) -> str:
    """The name under which a reward function's metrics are logged."""
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def reward_names(functions: Sequence[RewardFunction]) -> list[str]:
    """The names of several; of those that share one, such as partials of a function, the later are numbered."""
    names: list[str] = []
    for function in functions:
        name, number = reward_name(function), 2
        while (numbered := name if number == 2 else f"{name}_{number - 1}") in names:
            number += 1
        names.append(numbered)
    return names


def check_columns(names: list[str], columns: list[str]) -> None:
    """Raise ValueError naming the missing column when a built-in reward among `names` needs one the dataset lacks."""
    for name in names:
        builtin = BUILTINS.get(name)
        for choices in builtin.columns if builtin else ():
            if not set(choices) & set(columns):
                raise ValueError(
                    f"reward {name} needs the column {' or '.join(map(repr, choices))}; "
                    f"the dataset has {', '.join(sorted(columns))}"
                )


def load_reward(spec: RewardSpec, rewards_dir: Path, *, max_completion_length: int | None = None) -> RewardFunction:
    """The function a run names: a built-in (no version), or version N of a studio function, run in the sandbox.

    `max_completion_length` sets the limit of soft_overlong_punishment. Raises ValueError with one sentence for an unknown
    name, a missing file, or source that defines no usable function.
    """
    if spec.version is None:
        if spec.name not in BUILTINS:
            raise ValueError(f"reward {spec.name!r} is not built in; built in are {', '.join(sorted(BUILTINS))}")
        if spec.name == "soft_overlong_punishment" and max_completion_length is not None:
            return SoftOverlongPunishment(max_completion_length, max(1, max_completion_length // 4))
        return BUILTINS[spec.name].function
    from trainer_core.rewards.sandbox import Limits, SandboxedReward, function_name, validate_source

    path = rewards_dir / f"{spec.name}-v{spec.version}.py"
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"version {spec.version} of reward {spec.name!r} cannot be read: {error}") from error
    if problems := validate_source(source):
        raise ValueError(f"reward {spec.name!r} version {spec.version}: {problems[0]}")
    return SandboxedReward(source, function_name(source), Limits(), name=spec.name)


__all__ = [
    "BUILTINS", "Builtin", "HttpReward", "RewardFunction", "SoftOverlongPunishment", "accuracy_reward", "check_columns",
    "exact_match", "http_reward", "last_number_match", "load_reward", "reasoning_gym_score", "reward_name", "reward_names",
    "soft_overlong_punishment", "think_format_reward",
]  # fmt: skip
