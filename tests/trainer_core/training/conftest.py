from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_core.training.replay import CountingSync, ReplayWorker, prompts, save_tiny_llama
from trainer_core import generation
from trainer_core.config import AsyncGRPOConfig
from trainer_core.trainer import AsyncGRPOTrainer


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.fixture
def make_trainer(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., AsyncGRPOTrainer]]:
    """Builds a trainer whose worker replays `ReplayWorker.samples` and whose pushes go nowhere."""
    torch.set_num_threads(1)
    monkeypatch.setattr(generation, "RolloutWorker", ReplayWorker)
    monkeypatch.setattr(generation, "choose_sync", lambda **_: CountingSync())
    monkeypatch.setattr(generation, "look_at_server", lambda *_: None)

    def make(samples: list[Any], *, rows: int = 100, peft_config: Any = None, **settings: Any) -> AsyncGRPOTrainer:
        ReplayWorker.samples = samples
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "token_budget": 0,
            "max_steps": 2,
            "bf16": False,
            "learning_rate": 1e-3,
            "disable_tqdm": True,
            "use_cpu": True,
            "save_strategy": "no",
        }
        args = AsyncGRPOConfig(**{**defaults, **settings})
        return AsyncGRPOTrainer(
            str(tiny_llama), reward, args=args, train_dataset=prompts(rows), peft_config=peft_config
        )

    yield make
    ReplayWorker.samples, ReplayWorker.messages, ReplayWorker.made = [], [], []
