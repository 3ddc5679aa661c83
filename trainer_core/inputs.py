"""What a run takes in besides its model: prompts, rewards, tools and the environment, loaded and checked.

`python -m trainer_core.inputs --spec RUN/spec.yaml --run-dir RUN` does only that, so that the supervisor knows what is wrong
before it starts a server. Its exit code is 0, or 1 with one sentence as the last line. What it loaded of files and the hub is
in the datasets library's cache then, where the trainer finds it; of a generator it asks a few rows only. Without torch: an
interpreter with it takes as long to start as all of the checks together.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_core.checkpoint import load_rollout_state
from trainer_core.explain import sentence
from trainer_core.spec import DataSpec, RunSpec

REWARDS = "rewards"
"""Folder of a run with the sources of its reward functions."""
FEW_ROWS = 8
"""Rows that a check asks of a generator: enough for its options to be refused."""


class BadInput(ValueError):
    """One input can't be used. `field` is its dotted path in the spec; the text is one sentence."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True)
class Inputs:
    """What the trainer is made of. `evaluation` is None without evaluation, `environment` without one."""

    train: Any
    evaluation: Any
    rewards: list[Callable[..., Any]]
    tools: list[Callable[..., Any]]
    environment: Callable[[], Any] | None


def load_inputs(spec: RunSpec, run_dir: Path, *, few_generated: bool = False) -> Inputs:
    """Load everything and check that it fits together: rewards against the columns of both datasets.

    `few_generated` makes only some rows of a generator. Raises BadInput.
    """
    from trainer_core.rollout.datasets import load_prompts
    from trainer_core.rollout.streams import column_names

    def load(field: str, data: DataSpec) -> Any:
        if few_generated and data.is_generated:
            data = data.model_copy(update={"size": min(data.size, FEW_ROWS)})
        with about(field):
            rows = load_prompts(data)
        check_rewards(spec, field, column_names(rows))
        return rows

    tools, environment = load_agent(spec)
    rewards = _load_rewards(spec, run_dir)
    train, held_out = load("data", spec.data), spec.evaluation_data()
    evaluation = None if held_out is None else load("evaluation", held_out)
    return Inputs(train, evaluation, rewards, tools, environment)


def load_agent(spec: RunSpec) -> tuple[list[Callable[..., Any]], Callable[[], Any] | None]:
    """Tools, and what makes environments. Raises BadInput."""
    from trainer_core.rollout.registry import load_environment, load_tools

    with about("agent.tools"):
        tools = load_tools(spec.agent.tools)
    with about("agent.environment"):
        return tools, load_environment(spec.agent.environment, spec.agent.environment_options)


def check_rewards(spec: RunSpec, dataset: str, columns: list[str]) -> None:
    """Raise BadInput when a built-in reward needs a column that `dataset`, "data" or "evaluation", lacks."""
    from trainer_core.rewards import check_columns

    with about("rewards" if dataset == "data" else dataset):
        check_columns(spec.builtin_rewards, columns)


@contextmanager
def about(field: str) -> Iterator[None]:
    """Errors in here are about one field of the spec."""
    try:
        yield
    except ValueError as error:
        raise BadInput(field, f"evaluation: {error}" if field == "evaluation" else str(error)) from error


def _load_rewards(spec: RunSpec, run_dir: Path) -> list[Callable[..., Any]]:
    from trainer_core.rewards import load_reward

    limit = spec.rollout.max_completion_length
    with about("rewards"):
        return [load_reward(reward, run_dir / REWARDS, max_completion_length=limit) for reward in spec.rewards]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer_core.inputs", description="Check what a run takes in.")
    parser.add_argument("--spec", type=Path, required=True, help="the run's RunSpec, as YAML")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run, with its rewards")
    parser.add_argument("--resume", type=Path, help="checkpoint folder to continue from")
    arguments = parser.parse_args(argv)
    try:
        if arguments.resume is not None:
            load_rollout_state(arguments.resume)
        load_inputs(RunSpec.from_yaml(arguments.spec.read_text()), arguments.run_dir, few_generated=True)
    except Exception as error:  # noqa: BLE001  whatever it is, the run's page has to say it
        traceback.print_exc()
        print(sentence(error, "inputs.log"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
