"""A loop in this process against the fault injector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.trainer_core.rollout.mini_trainer import MiniTrainer, config_for
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout.state import RolloutState

MakeTrainer = Callable[..., MiniTrainer]


def first_token(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward with variance, which says what it was given for."""
    return [float(ids[0]) for ids in completion_ids]


def prompts(count: int) -> datasets.Dataset:
    rows = [{"prompt": [{"role": "user", "content": f"row {i}"}], "number": i} for i in range(count)]
    return datasets.Dataset.from_list(rows)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer() as stub:
        yield stub


@pytest.fixture
def make(server: StubServer, tiny_model: Path, tmp_path: Path) -> MakeTrainer:
    def build(
        rows: Any = 12, rewards: Any = (first_token,), state: RolloutState | None = None, **options: Any
    ) -> MiniTrainer:
        names = ("loop_cls", "tools", "environment_factory", "rows", "eval_rows")
        fields = {name: options.pop(name) for name in names if name in options}
        return MiniTrainer(
            config_for(server.url, tmp_path, **options),
            prompts(rows) if isinstance(rows, int) else rows,
            list(rewards),
            tiny_model,
            state or RolloutState(),
            rollouts_path=tmp_path / "rollouts.jsonl",
            **fields,
        )

    return build
