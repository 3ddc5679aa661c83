"""The training loop against replayed samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.trainer_core.training.replay import ReplayWorker, make_group
from trainer_core.metrics import describe
from trainer_core.rollout.messages import (
    GroupConsumed,
    GroupDropped,
    ServerBack,
    ServerLost,
    ServersReady,
    WeightsPushed,
    WorkerEvent,
    WorkerMetrics,
)
from trainer_core.spool import SPOOL_FILE

MakeTrainer = Callable[..., Any]


def groups(count: int, start: int = 0, **kwargs: Any) -> list[Any]:
    return [sample for row in range(start, start + count) for sample in make_group(row, **kwargs)]


def spool_lines(trainer: Any, kind: str) -> list[dict[str, Any]]:
    text = (Path(trainer.args.output_dir) / SPOOL_FILE).read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def events(trainer: Any) -> list[str]:
    """Names of the events, but for the warning that is always there: replayed samples are of no model."""
    return [line["name"] for line in spool_lines(trainer, "event") if line["name"] != "parity"]


def sent(kind: type) -> list[Any]:
    return [message for message in ReplayWorker.made[-1].sent if isinstance(message, kind)]


def test_a_step_trains_pushes_releases_and_reports(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(groups(6), max_steps=3)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert all((value != before[name]).any() for name, value in trainer.model.state_dict().items())
    metrics = spool_lines(trainer, "metrics")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert trainer.generation.sync.pushed == [1, 2, 3]
    assert [(message.version, message.model_name) for message in sent(WeightsPushed)] == [
        (1, "policy-v1"), (2, "policy-v2"), (3, "policy-v3"),
    ]  # fmt: skip
    assert [(message.group_id, message.samples) for message in sent(GroupConsumed)] == [
        (f"0-{row}", 4) for row in range(6)
    ]
    assert trainer.rollout_state.prompts_done() == 6
    assert events(trainer) == ["started", "first_step"]
    values = metrics[0]["values"]
    undeclared = [name for name in values if describe(name) is None]
    assert not undeclared
    samples = groups(2)
    assert values["rewards/trained_mean"] == pytest.approx(sum(sample.reward for sample in samples) / 8)
    assert values["batch/trained_tokens_per_step"] == sum(sample.completion_mask.sum() for sample in samples)
    assert values["sample/forwarded_tokens_mean"] == sum(len(sample.input_ids) for sample in samples) / 8
    assert values["epoch"] == pytest.approx(2 / 100)
    assert (
        values["batch/samples_per_step"],
        values["batch/microbatches_per_step"],
        values["batch/groups_per_step"],
    ) == (8, 2, 2)
    assert "sampling/step0_max_abs_diff" in values
    assert "sampling/step0_max_abs_diff" not in metrics[1]["values"]
    assert values["perf/step_s"] > values["perf/fwd_bwd_s"] > values["perf/fwd_s"] > 0
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logged] == pytest.approx([line["values"]["loss"] for line in metrics])


def test_gradient_does_not_depend_on_micro_batches(make_trainer: MakeTrainer) -> None:
    """One row of eight samples, eight rows of one, and a token budget: the same update and the same reported loss."""
    found = []
    for settings in (
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"token_budget": 45, "gradient_accumulation_steps": 8, "num_train_epochs": 1, "max_steps": -1},
    ):
        trainer = make_trainer(
            groups(2), **{"max_steps": 1, "rows": 2, "optim": "sgd", "learning_rate": 1.0, **settings}
        )
        trainer.train()
        loss = spool_lines(trainer, "metrics")[-1]["values"]["loss"]
        found.append((loss, torch.cat([value.flatten() for value in trainer.model.state_dict().values()])))
    for loss, weights in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        torch.testing.assert_close(weights, found[0][1], atol=1e-6, rtol=0)


def test_lora_with_reference_trains_only_the_adapter(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(groups(4), peft_config=LoraConfig(r=4, target_modules="all-linear"), beta=0.1)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    changed = {name for name, value in trainer.model.state_dict().items() if (value != before[name]).any()}
    assert changed
    assert all("lora_" in name for name in changed)
    first, second = (line["values"]["ref_kl"] for line in spool_lines(trainer, "metrics"))
    assert first == 0  # the adapter starts as nothing
    assert second > 0


def test_full_training_with_reference_keeps_the_reference_still(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(groups(4), beta=0.1)
    trainer.train()
    first, second = (line["values"]["ref_kl"] for line in spool_lines(trainer, "metrics"))
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-4


def test_stale_samples_are_dropped_counted_and_released(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplayWorker, "current_version", False)
    samples = groups(4, version=0) + groups(2, start=4, version=1)
    trainer = make_trainer(samples, max_steps=2, max_staleness=0)
    trainer.train()
    metrics = [line["values"] for line in spool_lines(trainer, "metrics")]
    # The first step trains groups 0 and 1; at the second, groups 2 and 3 are one version old.
    assert [values["sample/dropped_stale_total"] for values in metrics] == [0, 8]
    assert [values["sample/staleness_max"] for values in metrics] == [0, 0]
    assert [(message.group_id, message.samples) for message in sent(GroupConsumed)] == [
        ("0-0", 4), ("0-1", 4), ("0-2", 0), ("0-3", 0), ("0-4", 4), ("0-5", 4),
    ]  # fmt: skip
    assert trainer.rollout_state.prompts_done() == 6


def test_samples_within_the_bound_are_trained(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayWorker, "current_version", False)
    trainer = make_trainer(groups(6, version=0), max_steps=3, max_staleness=2)
    trainer.train()
    metrics = [line["values"] for line in spool_lines(trainer, "metrics")]
    assert [values["sample/staleness_mean"] for values in metrics] == [0, 1, 2]
    assert ["sampling/mismatch_kl" in values for values in metrics] == [True, False, False]


def test_epochs_count_distinct_prompts_and_dropped_ones(make_trainer: MakeTrainer) -> None:
    """Five prompts: four trained, in groups that need two and a half steps, one reported as dropped by the worker."""
    trainer = make_trainer(groups(4), rows=5, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=3,
                           gradient_accumulation_steps=4, num_generations=12)  # fmt: skip
    ReplayWorker.messages = [GroupDropped(row_index=4, epoch=0, reason="zero_variance")]
    trainer.train()
    steps = [line["values"]["batch/samples_per_step"] for line in spool_lines(trainer, "metrics")]
    assert steps == [12, 4]
    assert trainer.rollout_state.prompts_done() == 5
    assert trainer.state.epoch == 1


def test_passes_over_the_prompts_may_end_a_run_before_its_steps(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(groups(4), rows=4, max_steps=50, max_epochs=1)
    trainer.train()
    assert [line["step"] for line in spool_lines(trainer, "metrics")] == [1, 2]
    assert trainer.rollout_state.prompts_done() == 4


def test_the_attention_backend_can_be_chosen_and_is_named(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="'flex' cannot train on a CPU"):
        make_trainer(groups(2), attention_backend="flex")
    trainer = make_trainer(groups(2), max_steps=1, attention_backend="sdpa")
    assert trainer.backend == "sdpa"
    trainer = make_trainer(groups(2), max_steps=1)
    trainer.train()
    (started,) = (line for line in spool_lines(trainer, "event") if line["name"] == "started")
    assert started["text"] == "Training started; attention runs on sdpa."
    assert started["data"]["attention"] == "sdpa"


def test_oversize_samples_are_dropped_and_warned_about(make_trainer: MakeTrainer) -> None:
    samples = groups(4)
    budget = sorted(len(sample.input_ids) - 1 for sample in samples)[-2]
    samples[3].input_ids, samples[3].completion_mask = make_long(samples[3])
    trainer = make_trainer(samples, rows=4, token_budget=budget + 1, max_steps=-1, num_train_epochs=1)
    trainer.train()
    metrics = [line["values"] for line in spool_lines(trainer, "metrics")]
    assert sum(values.get("batch/dropped_oversize_total", 0) for values in metrics) == 1
    assert sum(values["batch/samples_per_step"] for values in metrics) == 15
    assert max(values["batch/row_tokens_max"] for values in metrics) <= budget + 1
    warning = next(line for line in spool_lines(trainer, "event") if line["name"] == "sample_dropped")
    assert "token_budget" in warning["text"]
    assert trainer.rollout_state.prompts_done() == 4


def make_long(sample: Any) -> tuple[Any, Any]:
    import numpy as np

    extra = 60
    for name in ("log_probs", "top_ids", "top_log_probs"):
        array = getattr(sample, name)
        setattr(sample, name, np.concatenate([array, np.repeat(array[-1:], extra, axis=0)]))
    return (
        np.concatenate([sample.input_ids, np.arange(extra) % 50 + 3]),
        np.concatenate([sample.completion_mask, np.ones(extra, int)]),
    )


def test_truncated_completions_can_be_left_out(make_trainer: MakeTrainer) -> None:
    samples = groups(3)
    for sample in samples[:4]:
        sample.truncated = True
    trainer = make_trainer(samples, max_steps=1, mask_truncated_completions=True)
    trainer.train()
    assert spool_lines(trainer, "metrics")[0]["values"]["batch/samples_per_step"] == 8
    assert trainer.rollout_state.prompts_done() == 3


@pytest.mark.parametrize(("order", "saved"), [("stop", False), ("stop_and_save", True)])
def test_control_file_stops_between_steps(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, order: str, saved: bool
) -> None:
    trainer = make_trainer(groups(20), max_steps=10, save_strategy="steps", save_steps=100)
    control = Path(trainer.args.output_dir) / "control"
    push = type(trainer)._end_step

    def end_step(self: Any, *args: Any) -> None:
        push(self, *args)
        if self.state.global_step == 2:
            control.write_text(order)

    monkeypatch.setattr(type(trainer), "_end_step", end_step)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.stop_order == order
    assert (Path(trainer.args.output_dir) / "checkpoint-2").is_dir() == saved
    assert ("checkpoint" in events(trainer)) == saved


def test_worker_messages_reach_spool_and_metrics(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(groups(2), max_steps=1)
    ReplayWorker.messages = [
        WorkerMetrics({"rollout/generated_tok_s": [10.0, 30.0], "rollout/fork_frac": [(1.0, 4.0), (1.0, 12.0)]}),
        WorkerEvent("warning", "reward_error", "The reward raised.", {"function": "f"}),
        ServerLost("http://localhost:1"),
        ServerBack("http://localhost:1"),
    ]
    trainer.train()
    values = spool_lines(trainer, "metrics")[0]["values"]
    assert values["rollout/generated_tok_s"] == 20
    assert values["rollout/fork_frac"] == 0.125
    assert events(trainer) == ["started", "reward_error", "server_lost", "server_back", "first_step"]
    assert trainer.generation.sync.pushed == [0, 1]
    kinds = [type(message) for message in ReplayWorker.made[-1].sent if not isinstance(message, GroupConsumed)]
    assert kinds == [WeightsPushed, ServersReady, WeightsPushed]


def test_weights_are_pushed_every_few_steps(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(groups(8), max_steps=4, weight_sync_steps=2)
    trainer.train()
    assert trainer.generation.sync.pushed == [1, 2]


def test_score_centering_off_needs_no_top_log_probabilities(make_trainer: MakeTrainer) -> None:
    samples = groups(2)
    for sample in samples:
        sample.top_ids = sample.top_log_probs = None
    trainer = make_trainer(samples, max_steps=1, score_centering=False)
    trainer.train()
    assert "sampling/sampler_mass" not in spool_lines(trainer, "metrics")[0]["values"]


def test_bad_arguments_are_refused_before_the_model_loads(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path
) -> None:
    from datasets import Dataset

    from trainer_core import generation
    from trainer_core import trainer as trainer_module
    from trainer_core.config import AsyncGRPOConfig
    from trainer_core.rollout.worker import RolloutWorker

    monkeypatch.setattr(trainer_module, "_load", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(generation, "RolloutWorker", RolloutWorker)
    args = AsyncGRPOConfig(output_dir=str(tmp_path))
    data = Dataset.from_list([{"prompt": "w1"}])
    build = trainer_module.AsyncGRPOTrainer
    with pytest.raises(ValueError, match="no 'prompt' column; found question"):
        build(str(tiny_llama), len, args, Dataset.from_list([{"question": "x"}]))
    with pytest.raises(TypeError, match="lambda"):
        build(str(tiny_llama), lambda completions: [], args, data)
    with pytest.raises(TypeError, match="reward_funcs holds a int"):
        build(str(tiny_llama), [3], args, data)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="model is a int"):
        build(3, len, args, data)  # type: ignore[arg-type]
    with_kernel = AsyncGRPOConfig(output_dir=str(tmp_path), attention_backend="fa3-hub", bf16=False)
    with pytest.raises(ValueError, match="attention backend 'fa3-hub' computes in 16 bits"):
        build(str(tiny_llama), len, with_kernel, data)
    with pytest.raises(ValueError, match="eval_dataset is given without eval_steps"):
        build(str(tiny_llama), len, args, data, eval_dataset=data)
    with pytest.raises(ValueError, match="eval_steps is given without eval_dataset"):
        build(str(tiny_llama), len, AsyncGRPOConfig(output_dir=str(tmp_path), eval_steps=1), data)
    with pytest.raises(ValueError, match="eval_dataset has no 'prompt' column; found x"):
        build(str(tiny_llama), len, args, data, eval_dataset=Dataset.from_list([{"x": 1}]))


def test_lora_on_the_output_layer_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(NotImplementedError, match="leave lm_head out of the LoRA target modules"):
        make_trainer([], peft_config=LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))


def test_router_loss_on_a_dense_model_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="model type 'llama' has no experts"):
        make_trainer([], router_aux_loss_coef=0.01)
