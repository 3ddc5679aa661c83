"""Checkpoints of a sharded model: others load them, and a resume goes on as if nothing had happened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from tests.trainer_core.training import ranks
from trainer_core import checkpoint, distributed_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2,
    "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": 0.1}


def losses(output: Path) -> dict[int, tuple[float, float]]:
    lines = [line for line in ranks.spool_lines(output, "metrics") if "loss" in line["values"]]
    return {line["step"]: (line["values"]["loss"], line["values"]["learning_rate"]) for line in lines}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_save_load_resume_fork(tiny_llama: Path, tmp_path: Path, lora: Any) -> None:
    job = {"model": str(tiny_llama), "settings": SETTINGS, "rows": 17, "served_dtype": "bfloat16", "lora": lora}
    straight, resumed, forked = tmp_path / "straight", tmp_path / "resumed", tmp_path / "forked"
    expected = ranks.result(straight, ranks.run(straight, job, ranks=2))["state"]
    folder = straight / "checkpoint-4"
    assert sorted(os.listdir(straight / "checkpoint-2")) == sorted(os.listdir(folder))
    assert not list(straight.glob(".saving-*"))

    # What others load: the weights in the server's precision, the adapter as it was trained.
    if lora is None:
        served = AutoModelForCausalLM.from_pretrained(folder)
        assert served.dtype == torch.bfloat16
        same(dict(served.named_parameters()), {name: value.bfloat16() for name, value in expected.items()})
        assert served.config.architectures == ["LlamaForCausalLM"]
    else:
        loaded = dict(AutoPeftModelForCausalLM.from_pretrained(folder).named_parameters())
        trained = {name: value for name, value in expected.items() if "lora_" in name}
        same({name: loaded[name] for name in trained}, trained)
        assert "library_name: peft" in (folder / "README.md").read_text()

    # A resume continues to the bit, from float32 weights and optimizer state.
    job["resume"] = str(straight / "checkpoint-2")
    same(ranks.result(resumed, ranks.run(resumed, job, ranks=2))["state"], expected)
    assert losses(resumed) == {step: values for step, values in losses(straight).items() if step > 2}

    # A fork begins at step 0 with the weights that others load.
    weights = tmp_path / "weights"
    weights.mkdir()
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".json") and path.name not in ("trainer_state.json", "rollout_state.json"):
            (weights / path.name).write_bytes(path.read_bytes())
    job["resume"] = str(checkpoint.starting_point(weights, tmp_path / "start", 4))
    job["settings"] = {**SETTINGS, "max_steps": 1, "learning_rate": 1e-30, "save_strategy": "no"}
    found = ranks.result(forked, ranks.run(forked, job, ranks=2))["state"]
    if lora is None:
        same(found, {name: value.bfloat16().float() for name, value in expected.items()})
    else:
        same(found, expected)


def test_one_process_does_not_resume_several_nor_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / distributed_checkpoint.SHARDS).mkdir()
    with pytest.raises(ValueError, match="several trainer ranks and this is one; resume it with two or more"):
        distributed_checkpoint.check_resumable(tmp_path, sharded=False)
    distributed_checkpoint.check_resumable(tmp_path, sharded=True)
    (tmp_path / distributed_checkpoint.SHARDS).rmdir()
    (tmp_path / "optimizer.pt").touch()
    with pytest.raises(ValueError, match="one trainer process and these are several ranks"):
        distributed_checkpoint.check_resumable(tmp_path, sharded=True)
    distributed_checkpoint.check_resumable(tmp_path, sharded=False)
