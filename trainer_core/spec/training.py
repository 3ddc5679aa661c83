"""The optimizer step, and the adapter that it trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer_core.spec.section import ADVANCED, Section

LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "gspo"]
AttentionBackend = Literal["auto", "fa3-hub", "fa4-hub", "fa4", "varlen", "flex", "sdpa"]


class TrainingSpec(Section):
    """The optimizer step."""

    max_steps: int = Field(
        200, ge=1, le=10_000_000, title="Optimizer steps", description="The run ends after this many steps."
    )
    max_epochs: float | None = Field(
        None, gt=0, title="Passes over the prompts", json_schema_extra=ADVANCED,
        description="The run ends earlier when every prompt was used this often; empty: by its steps alone.",
    )  # fmt: skip
    learning_rate: float = Field(1e-6, gt=0, le=1, title="Learning rate", description="AdamW. LoRA wants about 1e-4.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup"] = Field(
        "constant", title="Schedule", description="Shape of the learning rate.", json_schema_extra=ADVANCED
    )
    warmup_steps: int = Field(0, ge=0, title="Warm-up steps", description="Steps of linear warm-up, used by every "
                              "schedule but 'constant'.", json_schema_extra=ADVANCED)  # fmt: skip
    per_device_train_batch_size: int = Field(
        8, ge=1, title="Samples per device and micro-batch",
        description="Used for the fixed batch (token budget 0) and for the default concurrency.",
    )  # fmt: skip
    gradient_accumulation_steps: int = Field(
        8, ge=1, title="Gradient accumulation", description="Micro-batches of an optimizer step."
    )
    token_budget: int | None = Field(
        0, title="Token budget of a row",
        description="Unique tokens a packed row may hold. 0: a fixed number of samples; empty: the server's context length.",
    )  # fmt: skip
    loss_type: LossType = Field("dapo", title="Loss", description="Variant of the clipped objective.")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", title="Scale rewards", description="Divide advantages by this standard deviation."
    )
    epsilon: float = Field(0.2, gt=0, lt=1, title="Clip low", description="Ratio clipped at 1 - this.")
    epsilon_high: float | None = Field(None, gt=0, title="Clip high", description="Ratio clipped at 1 + this; "
                                       "empty: the same as clip low.")  # fmt: skip
    max_grad_norm: float = Field(1.0, gt=0, title="Max gradient norm", description="Clipping of the gradient norm.")
    adam_beta2: float = Field(0.999, gt=0, lt=1, title="Adam beta2", json_schema_extra=ADVANCED, description="Decay of "
                              "the second moment.")  # fmt: skip
    weight_decay: float = Field(0.0, ge=0, title="Weight decay", description="AdamW decay.", json_schema_extra=ADVANCED)
    bf16: bool = Field(True, title="bf16 autocast", description="Forward and backward in bfloat16 autocast.")
    gradient_checkpointing: bool = Field(
        True, title="Gradient checkpointing", description="Recompute activations: slower, less memory."
    )
    mask_truncated_completions: bool = Field(
        False, title="Mask truncated completions", json_schema_extra=ADVANCED,
        description="Leave completions that hit the length limit out of the loss.",
    )  # fmt: skip
    importance_sampling_min: float = Field(
        0.5, ge=0, lt=1, title="Ratio kept from", json_schema_extra=ADVANCED,
        description="Tokens whose trainer/sampler ratio is below this leave the loss.",
    )  # fmt: skip
    importance_sampling_max: float = Field(
        5.0, gt=1, title="Ratio kept to", json_schema_extra=ADVANCED,
        description="Tokens whose trainer/sampler ratio is above this leave the loss.",
    )  # fmt: skip
    beta: float = Field(
        0.0, ge=0, le=10, title="KL to the start (beta)", json_schema_extra=ADVANCED,
        description="Weight of the KL divergence to the model at the start; 0 needs no second model in memory. With LoRA the "
        "base model is compared with.",
    )  # fmt: skip
    score_centering: bool = Field(
        True, title="Score centering", json_schema_extra=ADVANCED,
        description="Remove the drift towards the sampler that differing precisions and stale samples cause.",
    )  # fmt: skip
    num_sampler_logprobs: int = Field(
        8, ge=1, le=32, title="Top tokens of the sampler", json_schema_extra=ADVANCED,
        description="How many of its most likely tokens score centering looks at; each costs the server some processor time.",
    )  # fmt: skip
    router_aux_loss_coef: float | None = Field(
        None, ge=0, le=10, title="Load balancing of experts", json_schema_extra=ADVANCED,
        description="Weight of the balancing loss of a mixture of experts; empty: the model's own, 0: none. Must be empty for "
        "a model without experts.",
    )  # fmt: skip
    attention_backend: AttentionBackend = Field(
        "auto", title="Attention backend", json_schema_extra=ADVANCED,
        description="auto takes FlashAttention-4 if it is installed and the GPU can run it, or else the best that there "
        "is; the run's events name it.",
    )  # fmt: skip
    compile_layers: bool = Field(
        False, title="Compile layers", json_schema_extra=ADVANCED,
        description="Faster steps after a first one that takes minutes; pays in long runs on a GPU.",
    )  # fmt: skip
    weight_sync_steps: int = Field(
        1, ge=1, title="Steps between weight pushes", description="1 keeps the server as fresh as possible."
    )
    seed: int = Field(
        42, ge=0, title="Seed",
        description="Seed of a new adapter's weights and of dropout. Prompts have the data seed; sampling is not seeded.",
    )  # fmt: skip


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for --max-lora-rank."""


class LoraSpec(Section):
    """Train a LoRA adapter instead of all weights."""

    enabled: bool = Field(True, title="LoRA", description="Train a low-rank adapter; off trains all weights.")
    r: int = Field(16, ge=1, le=LORA_RANKS[-1], title="Rank", description="Rank of the adapter.")
    alpha: int = Field(32, ge=1, title="Alpha", description="The adapter is scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, title="Dropout", description="Dropout on the adapter's input; makes the "
                           "trainer differ from the server.", json_schema_extra=ADVANCED)  # fmt: skip
    target_modules: str = Field(
        "all-linear", title="Target modules", description="'all-linear', or module names separated by commas."
    )
    push: Literal["auto", "adapter", "merged"] = Field(
        "auto", title="Push as", json_schema_extra=ADVANCED,
        description="How the server gets new versions: as adapters, which pauses nothing, or merged into full weights, which "
        "generates faster. auto: adapters on a GPU, merged on a CPU.",
    )  # fmt: skip
