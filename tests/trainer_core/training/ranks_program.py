"""Program of the tests with several ranks: trains on replayed samples, and keeps what they compare.

Argument: a JSON object with model, output, settings of AsyncGRPOConfig, lora (settings of LoraConfig), resume (a folder),
rows (prompts; the last one has a single sample), and fault (what goes wrong in the second step, on which rank).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.trainer_core.training.replay import CountingSync, ReplayWorker, make_group, prompts
from trainer_core import distributed, generation
from trainer_core import trainer as trainer_module
from trainer_core.config import AsyncGRPOConfig
from trainer_core.sync.gathering import WEIGHTS, Kind
from trainer_core.sync.weights import full_tensor


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


class GatheringSync(CountingSync):
    """Gathers what a push would send, and keeps it; each kind that fits the model."""

    def __init__(self, summon: Any, output: Path, kinds: list[Kind]) -> None:
        super().__init__()
        self.summon, self.output, self.kinds = summon, output, kinds

    def push(self, model: torch.nn.Module, version: int) -> Any:
        for kind in self.kinds:
            if self.summon is not None:
                self.summon(kind)
            tensors = {weight.name: weight.make().clone() for weight in WEIGHTS[kind](model)}
            torch.save(tensors, self.output / f"push-{kind}.pt")
        return super().push(model, version)


class Recorder(TrainerCallback):
    """Keeps the whole gradients of each step, on rank 0, and makes the wanted fault happen."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.fault = fault

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model = getattr(model, "module", model)
        named = [(name, value.grad) for name, value in model.named_parameters() if value.requires_grad]
        self.gradients.append({name: full_tensor(grad).clone() for name, grad in named})
        if self.fault and args.process_index == self.fault["rank"] and state.global_step == 1:
            if self.fault["what"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault["what"] == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ValueError("the test wants it to fail")


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    output = Path(job["output"])
    lora = None if job.get("lora") is None else LoraConfig(**job["lora"])
    kinds: list[Kind] = ["full"] if lora is None else ["merged", "adapter"]
    generation.RolloutWorker = ReplayWorker  # type: ignore[misc,assignment]
    generation.choose_sync = lambda summon=None, **_: GatheringSync(summon, output, kinds)  # type: ignore[assignment]
    generation.look_at_server = lambda *_: job.get("served_dtype")  # type: ignore[assignment,return-value]
    rows = job.get("rows", 9)
    ReplayWorker.samples = [
        sample for row in range(rows) for sample in make_group(row, size=1 if row == rows - 1 else 4)
    ]
    settings: dict[str, Any] = {
        "output_dir": str(output), "num_generations": 4, "per_device_train_batch_size": 4, "token_budget": 0,
        "num_train_epochs": 1, "bf16": False, "learning_rate": 0.5, "optim": "sgd", "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no",
    }  # fmt: skip
    args = AsyncGRPOConfig(**{**settings, **job["settings"]})
    recorder = Recorder(job.get("fault") or {})
    trainer = trainer_module.AsyncGRPOTrainer(
        job["model"], reward, args=args, train_dataset=prompts(rows), peft_config=lora, callbacks=[recorder]
    )
    trainer.train(resume_from_checkpoint=job.get("resume"))
    state = {name: full_tensor(value.detach()).clone() for name, value in trainer.model.named_parameters()}
    if trainer.is_world_process_zero():
        torch.save({"state": state, "gradients": recorder.gradients}, output / "result.pt")


def run(job: dict[str, Any]) -> None:
    """The program: a failure is told to the other ranks, as trainer_core.launch does."""
    try:
        main(job)
    except Exception as error:
        distributed.current.fail(error, f"{type(error).__name__}: {error}")
        raise
    distributed.current.leave_torch()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
