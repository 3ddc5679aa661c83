"""Settings: defaults as promised, and one sentence for what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from trainer_core.config import AsyncGRPOConfig

# The table of the original description.
DEFAULTS = {
    "model_init_kwargs": None, "dtype": "float32", "trust_remote_code": False, "router_aux_loss_coef": None,
    "learning_rate": 1e-6, "lr_scheduler_type": "constant", "logging_steps": 1, "bf16": True, "gradient_checkpointing": True,
    "ignore_data_skip": True, "num_generations": 8, "max_completion_length": 2048, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "chat_template_kwargs": None, "max_tool_calling_iterations": None,
    "fork_threshold_tokens": 1024, "vllm_server_base_url": "http://localhost:8000", "vllm_server_timeout": 240,
    "request_timeout": 600, "weight_sync_timeout": 1800, "epsilon": 0.2, "epsilon_high": 0.2, "loss_type": "dapo",
    "scale_rewards": "group", "beta": 0.0, "mask_truncated_completions": False, "score_centering": True,
    "num_sampler_logprobs": 8, "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0,
    "token_budget": None, "max_concurrent_rollouts": 4 * 8, "max_staleness": 4, "queue_maxsize": 1024,
    "weight_sync_steps": 1, "heartbeat_stale_after_s": 300, "reward_timeout": 60, "max_generation_failures": 10,
    "eval_steps": None, "eval_num_generations": 1, "log_completions": False, "num_completions_to_print": None,
}  # fmt: skip


def make(tmp_path: Path, **settings: Any) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **settings)


def test_defaults(tmp_path: Path) -> None:
    config = make(tmp_path)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_derived_values(tmp_path: Path) -> None:
    config = make(
        tmp_path,
        epsilon=0.1,
        max_staleness=0,
        gradient_accumulation_steps=3,
        vllm_server_base_url=["http://a/", "http://b"],
    )
    assert config.epsilon_high == 0.1
    assert config.samples_per_step == 24
    assert config.max_concurrent_rollouts == 24
    assert config.server_urls == ["http://a", "http://b"]
    assert make(tmp_path, fp16=True).bf16 is False
    assert make(tmp_path, ignore_data_skip=False).ignore_data_skip is True


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"num_generations": 1}, ValueError, "num_generations is 1; it must be at least 2"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0; it must be above 0"),
        ({"top_p": 1.5}, ValueError, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"min_p": -1.0}, ValueError, "min_p is -1.0; it must be between 0 and 1, or None"),
        ({"epsilon": 1.0}, ValueError, "epsilon is 1.0; it must be below 1"),
        ({"loss_type": "ppo"}, ValueError, "loss_type is 'ppo'; allowed are dapo, grpo, dr_grpo, bnpo, cispo, gspo"),
        ({"scale_rewards": "std"}, ValueError, "scale_rewards is 'std'; allowed are group, batch, none"),
        ({"dtype": "int8"}, ValueError, "dtype is 'int8'; allowed are float32, bfloat16, float16"),
        ({"vllm_importance_sampling_clip_max": 0.9}, ValueError, "clip_max is 0.9; it must be above 1"),
        ({"lr_scheduler_type": "cosine"}, ValueError, "'cosine' needs to know the number of steps; set max_steps"),
        ({"token_budget": 0, "per_device_train_batch_size": 3}, ValueError, "holds 3 samples"),
        ({"max_staleness": -1}, ValueError, "max_staleness is -1; it must be at least 0"),
        ({"vllm_server_base_url": []}, ValueError, "vllm_server_base_url is empty"),
        ({"use_liger_kernel": True}, NotImplementedError, "use_liger_kernel is not supported"),
        ({"eval_strategy": "epoch"}, NotImplementedError, "evaluation happens every eval_steps steps"),
        ({"eval_steps": 5, "weight_sync_steps": 2}, ValueError, "it must be a multiple of weight_sync_steps (2)"),
        ({"max_epochs": 0.0}, ValueError, "max_epochs is 0.0; it must be above 0, or None"),
        ({"eval_top_p": 0.0}, ValueError, "eval_top_p is 0.0; it must be above 0 and at most 1, or None"),
        ({"eval_temperature": -1.0}, ValueError, "eval_temperature is -1.0; it must be at least 0, or None"),
        ({"eval_at_start": True}, ValueError, "eval_at_start is on, but nothing is evaluated; set eval_steps"),
        ({"neftune_noise_alpha": 1.0}, NotImplementedError, "neftune_noise_alpha"),
    ],
)
def test_refusals(tmp_path: Path, settings: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        make(tmp_path, **settings)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("axis", ["cp_size", "sp_size"])
def test_sequence_parallelism_is_refused(tmp_path: Path, axis: str) -> None:
    parallelism = ParallelismConfig()
    setattr(parallelism, axis, 2)
    config = make(tmp_path)
    config.parallelism_config = parallelism
    with pytest.raises(ValueError, match=f"{axis} 2; rows are packed trees and cannot be cut along the sequence"):
        config._check_unsupported()


def test_decaying_schedule_with_max_steps(tmp_path: Path) -> None:
    assert make(tmp_path, lr_scheduler_type="cosine", max_steps=10).max_steps == 10
