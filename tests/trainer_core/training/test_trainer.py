"""The training loop against replayed samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import LoraConfig

from tests.trainer_core.training.replay import ReplayWorker, make_group
from trainer_core.rollout.messages import GroupConsumed, WeightsPushed
from trainer_core.spool import SPOOL_FILE


def groups(count: int, **kwargs: Any) -> list[Any]:
    return [sample for row in range(count) for sample in make_group(row, **kwargs)]


def spool_lines(trainer: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(trainer.args.output_dir) / SPOOL_FILE).read_text().splitlines()]


def test_steps_report_push_and_release(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(groups(6), max_steps=3)
    trainer.train()
    lines = spool_lines(trainer)
    metrics = [line for line in lines if line["kind"] == "metrics"]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert trainer.sync.pushed == [1, 2, 3]
    sent = ReplayWorker.made[-1].sent
    assert [message.version for message in sent if isinstance(message, WeightsPushed)] == [1, 2, 3]
    assert sum(message.samples for message in sent if isinstance(message, GroupConsumed)) == 24
    assert trainer.rollout_state.prompts_done() == 6
    print(metrics[-1])


def test_lora_step(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(groups(4), peft_config=LoraConfig(r=4, target_modules="all-linear"), beta=0.1)
    trainer.train()
    assert trainer.state.global_step == 2
