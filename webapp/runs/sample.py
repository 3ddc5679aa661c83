"""The sample run: small enough for two CPU cores, real enough to show a steep, honest curve."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainer_core.spec import RunSpec
from webapp.hosts.processor import multiplies_in_bf16


def computes_in_bf16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine has a GPU, or a processor that multiplies in bfloat16."""
    return shutil.which("nvidia-smi") is not None or multiplies_in_bf16(cpu_info)


def sample_spec() -> RunSpec:
    """SmolLM2-135M learns to multiply one-digit numbers, with a LoRA adapter."""
    bf16 = computes_in_bf16()
    return RunSpec.model_validate(
        {
            "name": "sample: one-digit products",
            "tags": ["sample"],
            "notes": "SmolLM2-135M learns one-digit multiplication; the reward looks at the last number of its reply.",
            "model": {"path": "smollm2-135m-instruct", "dtype": "float32"},
            "data": {
                "source": "reasoning_gym:products",
                "size": 500,
                "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            },
            "rewards": [{"name": "last_number_match"}],
            "rollout": {"num_generations": 8, "max_completion_length": 16, "temperature": 1.0, "max_staleness": 1},
            "training": {
                "max_steps": 20,
                "learning_rate": 2e-4,
                "per_device_train_batch_size": 64,
                "gradient_accumulation_steps": 1,
                "adam_beta2": 0.99,
                "bf16": bf16,
                "gradient_checkpointing": False,
            },
            "lora": {"enabled": True, "r": 16, "alpha": 32},
            "server": {"max_model_len": 256, "dtype": "bfloat16" if bf16 else "float32"},
            "checkpoints": {"save_steps": 8},
        }
    )
