"""The runs of bench/gpu_e2e.py: the sample task, trained and served in several ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_core.spec import RunSpec

FULL = {"lora": {"enabled": False}, "training": {"learning_rate": 1e-5}}


@dataclass(frozen=True)
class Phase:
    """One run. `changes` are laid over the sample run; at step `kill_at` its server is killed; `one_gpu` hides the others."""

    name: str
    title: str
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int = 60
    kill_at: int | None = None
    one_gpu: bool = False

    def spec(self, *, cpu: bool, model: str | None) -> RunSpec:
        """The run's RunSpec; with `cpu` small enough for two cores."""
        from webapp.runs.sample import sample_spec

        spec = sample_spec().model_dump(mode="json")
        # The size of the cache is given, since servers that start together on one GPU can't measure what is free. A start
        # without CUDA graphs takes half the time.
        server = {"enforce_eager": True, "max_restarts": 2, "kv_cache_gib": 4.0, "startup_timeout": 240.0}
        training = {"max_steps": self.steps}
        if cpu:
            server |= {
                "kv_cache_gib": 0.0625,
                "max_model_len": 512,
                "max_num_seqs": 16,
                "dtype": "float32",
                "startup_timeout": 900.0,
            }
            training |= {"max_steps": 8, "per_device_train_batch_size": 16, "bf16": False}
            # A model of random weights is never right, but some of its completions are shorter than others.
            spec["rewards"] = [{"name": "soft_overlong_punishment"}]
            spec["rollout"] |= {"max_completion_length": 48}
        cuts: dict[str, Any] = {"name": f"gpu: {self.title}", "tags": ["bench"], "server": server, "training": training}
        cuts["checkpoints"] = {"save_steps": 10_000}
        for change in (cuts, self.changes, {"model": {"path": model}} if model else {}):
            for section, values in change.items():
                spec[section] = {**spec[section], **values} if isinstance(values, dict) else values
        return RunSpec.model_validate(spec)


PHASES = (
    Phase("full", "full fine-tuning, NCCL, server killed in mid-run", FULL, steps=90, kill_at=30),
    Phase("merged", "LoRA, merged weights over NCCL", {"lora": {"push": "merged"}}),
    Phase("adapter", "LoRA, adapters", {"lora": {"push": "adapter"}}),
    Phase("ranks", "full fine-tuning, two FSDP2 ranks, the server on the GPU of the second",
          {**FULL, "resources": {"trainer_gpus": 2}, "training": {"learning_rate": 1e-5, "per_device_train_batch_size": 32}}),
    Phase("shared", "full fine-tuning, server and trainer on one GPU, gloo", FULL, steps=40, one_gpu=True),
)  # fmt: skip
CPU_PHASES = (
    Phase("full", "full fine-tuning, gloo, server killed in mid-run", FULL, kill_at=3),
    Phase("adapter", "LoRA, adapters", {"lora": {"push": "adapter"}}),
)
