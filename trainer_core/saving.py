"""The trainer's checkpoints: what is written when, and what a resume reads. The folders themselves: trainer_core.checkpoint.

transformers calls hooks of the trainer for all of this; they are one call each of what is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from trainer_core import checkpoint, distributed_checkpoint
from trainer_core.families import model_class

if TYPE_CHECKING:
    from trainer_core.trainer import AsyncGRPOTrainer


class CheckpointKeeper:
    """Puts the checkpoints of one trainer together. `last_step` is the step of the newest, -1 without one."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self._trainer = trainer
        self._output = Path(str(trainer.args.output_dir))
        self.staging: Path | None = None
        self.last_step = -1

    def to_resume(self, wanted: str | bool | None) -> Path | None:
        """The folder to continue from, which is looked at; True asks for the newest. Clears what a crash left behind.

        Raises ValueError when it is no checkpoint, or one of another number of ranks.
        """
        if self._trainer.ranks.leads:
            checkpoint.remove_leftovers(self._output)
        self._trainer.accelerator.wait_for_everyone()
        if wanted is True:
            wanted = checkpoint.latest(self._output)
        if not wanted:
            return None
        folder = Path(str(wanted))
        self._trainer.rollout_state = checkpoint.load_rollout_state(folder)
        distributed_checkpoint.check_resumable(folder, self._trainer.is_fsdp_enabled)
        return folder

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around transformers' own writing: completes the checkpoint and publishes it, whole or not at all."""
        trainer = self._trainer
        step, args = trainer.state.global_step, trainer.args
        with trainer.report.timed("perf/checkpoint_s"):
            self.staging = checkpoint.staging_folder(self._output, step)
            staged = self.staging / f"checkpoint-{step}"
            final = self._output / staged.name
            try:
                yield
            finally:
                self.staging = None
            if trainer.state.best_global_step == step:  # where it will be, not where it is put together
                trainer.state.best_model_checkpoint = str(final)
                if trainer.is_world_process_zero():
                    trainer.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            trainer.accelerator.wait_for_everyone()
            self.last_step = step
            if not trainer.is_world_process_zero():
                return
            checkpoint.save_rollout_state(staged, trainer.rollout_state)
            kind = "adapter" if isinstance(trainer.model, PeftModel) else "full"
            if kind == "adapter":
                names = [getattr(function, "__name__", type(function).__name__) for function in trainer.reward_funcs]
                checkpoint.write_adapter_card(
                    staged, base_model=trainer.model_path, auto_class=model_class(trainer.model.config).__name__, step=step,
                    rewards=names, loss_type=args.loss_type,
                )  # fmt: skip
            checkpoint.publish(staged, final)
        size = checkpoint.size_bytes(final)
        text = f"Checkpoint of step {step} written."
        trainer.event("info", "checkpoint", text, step=step, path=str(final), size_bytes=size, kind=kind)
        rotate_checkpoints(
            output_dir=str(self._output),
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )

    def save_gathered(self, folder: Path) -> None:
        """The weights or adapter of a sharded model as others load them, in the precision that the server serves."""
        trainer = self._trainer
        served = None if trainer.generation is None else trainer.generation.served_dtype
        dtype = None if isinstance(trainer.model, PeftModel) else getattr(torch, served or trainer.args.compute_dtype)
        state = distributed_checkpoint.gather_state(trainer.model, dtype, keep=trainer.ranks.leads)
        if trainer.ranks.leads:
            trainer._save(str(folder), state_dict=state)
            if dtype is not None:
                distributed_checkpoint.note_dtype(folder, dtype)

    def has_value(self, metrics: dict[str, float]) -> bool:
        """Whether the evaluation can be the best: something is compared by, and it is a number."""
        name = self._trainer.args.metric_for_best_model
        return name is not None and not math.isnan(metrics[name])

    def note_best(self, metrics: dict[str, float]) -> None:
        """This step is the best so far by metric_for_best_model: have it saved, and say so."""
        trainer, name = self._trainer, str(self._trainer.args.metric_for_best_model)
        trainer.control.should_save = True
        text = f"The best {name.replace('_', '/', 1)} so far, {metrics[name]:.4g}."
        trainer.event("info", "best", text, step=trainer.state.global_step, metric=name, value=metrics[name])
