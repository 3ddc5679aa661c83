"""Program of test_ranks: trains on replayed samples and saves the weights. Arguments: model, output, accumulation steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainer_core.training.replay import CountingSync, ReplayWorker, make_group, prompts
from trainer_core import trainer as trainer_module
from trainer_core.config import AsyncGRPOConfig

ROWS = 9


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def main(model: str, output: Path, accumulation: int) -> None:
    torch.set_num_threads(1)
    trainer_module.RolloutWorker = ReplayWorker  # type: ignore[misc,assignment]
    trainer_module.choose_sync = lambda **_: CountingSync()  # type: ignore[assignment]
    trainer_module.look_at_server = lambda *_: None
    ReplayWorker.samples = [sample for row in range(ROWS) for sample in make_group(row)]
    args = AsyncGRPOConfig(
        output_dir=str(output),
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        token_budget=0,
        num_train_epochs=1,
        bf16=False,
        learning_rate=0.5,
        optim="sgd",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    trainer = trainer_module.AsyncGRPOTrainer(model, reward, args=args, train_dataset=prompts(ROWS))
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), output / f"weights-{trainer.args.world_size}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
