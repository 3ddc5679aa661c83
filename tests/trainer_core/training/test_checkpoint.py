"""Checkpoints: whole or not there, and a resume that goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig

from tests.trainer_core.training.replay import ReplayWorker, make_group
from tests.trainer_core.training.test_trainer import events, spool_lines
from trainer_core import checkpoint
from trainer_core.rollout.state import RolloutState

MakeTrainer = Callable[..., Any]


def groups(count: int) -> list[Any]:
    return [sample for row in range(count) for sample in make_group(row)]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("peft_config", [None, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")])
def test_resumed_run_is_bit_for_bit_the_run_that_went_on(
    make_trainer: MakeTrainer, tmp_path: Path, peft_config: Any
) -> None:
    settings: dict[str, Any] = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear", "peft_config": peft_config,
    }  # fmt: skip
    straight = make_trainer(groups(12), **settings, output_dir=str(tmp_path / "straight"))
    straight.train()
    expected = weights(straight)

    resumed = make_trainer(groups(12), **settings, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name]), name
    assert resumed.generation.sync.pushed == [3, 4, 5, 6]  # the restored weights first
    assert resumed.rollout_state.prompts_done() == 12
    assert resumed.rollout_state.to_json() == straight.rollout_state.to_json()
    old, new = (spool_lines(trainer, "metrics") for trainer in (straight, resumed))
    for left, right in zip(old[3:], new, strict=True):
        assert left["step"] == right["step"]
        assert left["values"]["loss"] == right["values"]["loss"]
        assert left["values"]["learning_rate"] == right["values"]["learning_rate"]


@pytest.mark.parametrize("peft_config", [None, LoraConfig(r=4, target_modules="all-linear")])
def test_a_fork_begins_at_step_0_with_the_weights_of_a_checkpoint_and_all_prompts_to_do(
    make_trainer: MakeTrainer, tmp_path: Path, peft_config: Any
) -> None:
    origin = make_trainer(
        groups(12), max_steps=3, save_strategy="steps", save_steps=3, peft_config=peft_config,
        output_dir=str(tmp_path / "origin"),
    )  # fmt: skip
    origin.train()
    expected = weights(origin)
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in (tmp_path / "origin" / "checkpoint-3").iterdir():
        if path.suffix in (".safetensors", ".json") and path.name not in ("trainer_state.json", "rollout_state.json"):
            (copied / path.name).write_bytes(path.read_bytes())

    start = checkpoint.starting_point(copied, tmp_path / "fork" / "start", 4)
    settings: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-30, "output_dir": str(tmp_path / "fork")}
    fork = make_trainer(groups(12), peft_config=peft_config, **settings)
    fork.train(resume_from_checkpoint=str(start))
    assert [line["step"] for line in spool_lines(fork, "metrics")] == [1, 2]
    assert fork.generation.sync.pushed == [1, 2, 3]  # the checkpoint's weights first
    assert fork.rollout_state.prompts_done() == 4
    for name, value in weights(fork).items():
        assert torch.equal(value, expected[name]), name


def test_worker_gets_the_training_position_not_the_queue(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Samples that were only queued when the run ended are generated again."""
    first = make_trainer(groups(12), max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    saved = checkpoint.load_rollout_state(Path(first.args.output_dir) / "checkpoint-2")
    assert saved.done(0) == {0, 1, 2, 3}
    assert saved.weight_version == 2
    second = make_trainer(groups(12), max_steps=6)
    second.train(resume_from_checkpoint=True)
    assert ReplayWorker.made[-1].state.done(0) == set(range(12))
    trained = sum(
        line["values"]["batch/samples_per_step"] for line in spool_lines(second, "metrics") if line["step"] > 2
    )
    assert trained == 8 * 4


def test_resuming_a_finished_run_does_nothing(make_trainer: MakeTrainer) -> None:
    make_trainer(groups(4), max_steps=2, save_strategy="steps", save_steps=2).train()
    workers = len(ReplayWorker.made)
    again = make_trainer([], max_steps=2, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert len(ReplayWorker.made) == workers
    assert again.state.global_step == 2


def test_end_of_training_is_saved_and_old_checkpoints_go(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(groups(10), max_steps=5, save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer.train()
    output = Path(trainer.args.output_dir)
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    assert not list(output.glob(".*"))
    written = [line for line in spool_lines(trainer, "event") if line["name"] == "checkpoint"]
    assert [line["data"]["step"] for line in written] == [2, 4, 5]
    assert written[-1]["data"]["path"] == str(output / "checkpoint-5")
    assert written[-1]["data"]["size_bytes"] == checkpoint.size_bytes(output / "checkpoint-5")
    assert written[-1]["data"]["kind"] == "full"


def test_adapter_checkpoint_loads_with_peft(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        groups(4), save_strategy="steps", save_steps=2, peft_config=LoraConfig(r=4, target_modules="all-linear")
    )
    trainer.train()
    folder = Path(trainer.args.output_dir) / "checkpoint-2"
    card = (folder / "README.md").read_text()
    assert "library_name: peft" in card
    assert "reward" in card
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    trained = dict(trainer.model.named_parameters())
    adapter = {name: value for name, value in loaded.named_parameters() if "lora_" in name}
    assert adapter
    assert all(torch.equal(value, trained[name]) for name, value in adapter.items())
    assert events(trainer) == ["started", "first_step", "checkpoint"]


def test_a_failed_save_leaves_the_previous_checkpoint(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(groups(8), max_steps=4, save_strategy="steps", save_steps=2)
    save = checkpoint.save_rollout_state

    def full_disk(folder: Path, state: RolloutState) -> None:
        if "checkpoint-4" in str(folder):
            raise OSError(28, "No space left on device")
        save(folder, state)

    monkeypatch.setattr(checkpoint, "save_rollout_state", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    output = Path(trainer.args.output_dir)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    assert checkpoint.latest(output).endswith("checkpoint-2")
    monkeypatch.undo()


KILLED = """
import os, signal, sys
from pathlib import Path
from trainer_core import checkpoint
output = Path(sys.argv[1])
staged = checkpoint.staging_folder(output, 4) / "checkpoint-4"
staged.mkdir()
(staged / "model.safetensors").write_bytes(b"half of it")
real = os.replace
def replace(source, target):
    if Path(target).name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
os.replace = replace
checkpoint.publish(staged, output / "checkpoint-4")
"""


@pytest.mark.parametrize(("dies_before", "existing"), [("checkpoint-4", False), ("checkpoint-4", True)])
def test_kill_between_write_and_rename(tmp_path: Path, dies_before: str, existing: bool) -> None:
    names = ["checkpoint-2", "checkpoint-4"] if existing else ["checkpoint-2"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollout_state.json").write_text(RolloutState(2, 5).to_json())
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), dies_before], check=False)
    assert process.returncode == -signal.SIGKILL
    checkpoint.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == names
    for name in names:
        assert checkpoint.load_rollout_state(tmp_path / name).weight_version == 2


def test_publish_replaces_a_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    for content in ("old", "new"):
        staged = checkpoint.staging_folder(tmp_path, 4) / "checkpoint-4"
        staged.mkdir()
        (staged / "file").write_text(content)
        checkpoint.publish(staged, tmp_path / "checkpoint-4")
    assert (tmp_path / "checkpoint-4" / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["checkpoint-4"]


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no rollout_state\.json"):
        checkpoint.load_rollout_state(tmp_path)
    (tmp_path / "rollout_state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="no rollout state"):
        checkpoint.load_rollout_state(tmp_path)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        checkpoint.latest(tmp_path)
