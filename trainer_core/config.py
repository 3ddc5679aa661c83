"""AsyncGRPOConfig: every setting of a run, on top of transformers.TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import SchedulerType, TrainingArguments

LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "gspo")
SCALE_REWARDS = ("group", "batch", "none")
DTYPES = ("float32", "bfloat16", "float16")
EVAL_METRICS = ("eval_reward", "eval_pass@1", "eval_pass@k")
# These schedules do not depend on how many steps there will be; the count is unknown while prompts are what ends a run.
ENDLESS_SCHEDULES = {SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.INVERSE_SQRT}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class AsyncGRPOConfig(TrainingArguments):
    """Settings of `AsyncGRPOTrainer`.

    Raises ValueError with one sentence when a value is impossible, NotImplementedError when it is possible in principle
    but not supported.
    """

    # Changed defaults of TrainingArguments
    learning_rate: float = _option(1e-6, "Peak learning rate of AdamW.")
    lr_scheduler_type: SchedulerType | str = _option("constant", "A decaying schedule needs max_steps.")
    logging_steps: float = _option(1, "Optimizer steps between two logs.")
    bf16: bool | None = _option(None, "bfloat16 autocast; unset: on unless fp16 is on.")  # type: ignore[assignment]
    gradient_checkpointing: bool = _option(True, "Recompute activations in the backward pass.")
    ignore_data_skip: bool = _option(True, "Always on: a live queue cannot be skipped and replayed.")
    logging_nan_inf_filter: bool = _option(
        False, "Hide a loss that is no number; looking waits for the GPU at each row."
    )
    report_to: str | list[str] | None = _option("none", "Exporters of transformers, such as tensorboard or wandb.")

    # The model
    model_init_kwargs: dict[str, Any] | str | None = _option(None, "Keyword arguments of from_pretrained.")
    dtype: str = _option("float32", "Precision the trained weights are kept in.")
    trust_remote_code: bool = _option(False, "Allow model code from the hub.")
    router_aux_loss_coef: float | None = _option(None, "MoE load-balancing loss; None: the model's value, 0: off.")

    attention_backend: str | None = _option(
        None, "Name of an attention backend; None: FlashAttention-4 if it is there, or else the best that is."
    )
    compile_layers: bool = _option(False, "Compile the decoder layers: faster steps after a first slow one.")

    # Generation
    num_generations: int = _option(8, "Rollouts per prompt.")
    max_completion_length: int = _option(2048, "Tokens generated in a whole rollout, all turns.")
    temperature: float = _option(1.0, "Sampling temperature.")
    top_p: float = _option(1.0, "Nucleus sampling.")
    top_k: int = _option(0, "Sample from this many tokens; 0: from all.")
    min_p: float | None = _option(None, "Minimum probability relative to the most likely token.")
    repetition_penalty: float = _option(1.0, "1 turns it off.")
    chat_template_kwargs: dict[str, Any] | str | None = _option(None, "Extra arguments of the chat template.")
    max_tool_calling_iterations: int | None = _option(None, "Tool turns of a rollout; None: no limit.")
    tool_timeout: float = _option(60.0, "Seconds one call of a tool or an environment may take.")
    fork_threshold_tokens: int = _option(1024, "A smaller re-tokenisation drift realigns, a larger one forks.")

    # The server
    vllm_server_base_url: str | list[str] = _option("http://localhost:8000", "One URL, or one for each replica.")
    vllm_server_timeout: float = _option(240.0, "Seconds the server may take to be ready.")
    request_timeout: float = _option(600.0, "Seconds one request may take.")
    weight_sync_timeout: float = _option(1800.0, "Seconds one weight push may take.")

    # The objective
    epsilon: float = _option(0.2, "The ratio is clipped at 1 - this.")
    epsilon_high: float | None = _option(None, "The ratio is clipped at 1 + this; None: epsilon.")
    loss_type: str = _option("dapo", "dapo, grpo, dr_grpo, bnpo, cispo or gspo.")
    scale_rewards: str = _option("group", "Standard deviation that divides advantages: of the group, the batch, none.")
    reward_weights: list[float] | None = _option(None, "A factor for each reward function; None: 1 for each.")
    beta: float = _option(0.0, "Weight of the k3 KL to the reference model; 0 loads no reference.")
    mask_truncated_completions: bool = _option(False, "Leave completions that hit the length limit out of the loss.")
    score_centering: bool = _option(True, "Remove the drift towards the sampler (arXiv 2609.20807).")
    num_sampler_logprobs: int = _option(8, "Most likely tokens of the sampler that score centering uses.")
    vllm_importance_sampling_clip_min: float = _option(0.5, "Tokens whose ratio is below this leave the loss.")
    vllm_importance_sampling_clip_max: float = _option(5.0, "Tokens whose ratio is above this leave the loss.")

    # Batches and staleness
    token_budget: int | None = _option(
        None, "Unique tokens of a row; None: the server's max_model_len; 0 or less: a fixed number of samples."
    )
    max_epochs: float | None = _option(
        None, "End after this many passes over the prompts although max_steps is not reached; None: by max_steps alone."
    )
    max_concurrent_rollouts: int | None = _option(
        None, "Ceiling of requests in flight; None: max(max_staleness, 1) times the samples of an optimizer step."
    )
    max_staleness: int = _option(4, "Weight updates a sample may lag.")
    queue_maxsize: int = _option(1024, "Scored samples buffered.")
    weight_sync_steps: int = _option(1, "Optimizer steps between weight pushes.")
    heartbeat_stale_after_s: float = _option(300.0, "Seconds of silence after which the rollout worker counts as hung.")
    reward_timeout: float = _option(60.0, "Seconds of one scoring call.")
    max_generation_failures: int = _option(10, "Consecutive failed rollouts before the run fails.")

    # Evaluation and reporting
    eval_steps: float | None = _option(None, "Optimizer steps between two evaluations of eval_dataset.")
    eval_num_generations: int = _option(1, "Rollouts per evaluation prompt.")
    eval_at_start: bool = _option(False, "Evaluate before the first step as well.")
    eval_temperature: float | None = _option(None, "Temperature of an evaluation; None: that of training, 0: greedy.")
    eval_top_p: float | None = _option(None, "Nucleus sampling of an evaluation; None: as in training.")
    eval_pass_above: float = _option(0.0, "An evaluation rollout passes when its reward is above this.")
    log_completions: bool = _option(False, "Print completions of each step.")
    num_completions_to_print: int | None = _option(None, "How many of them; None: all.")
    attempt_dir: str | None = _option(None, "Where the control file and the spool are; None: output_dir.")

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "chat_template_kwargs"]

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16
        if self.bf16 and not torch.cuda.is_available():
            self.use_cpu = True  # otherwise TrainingArguments asks for a GPU before it allows bf16
        self.ignore_data_skip = True
        if self.eval_steps is not None and self.eval_strategy == "no":
            self.eval_strategy = "steps"
        if self.metric_for_best_model is not None:  # transformers writes names of evaluation metrics with an underscore
            self.metric_for_best_model = self.metric_for_best_model.replace("eval/", "eval_", 1)
            if self.save_total_limit == 1:
                # With 1 transformers deletes all but the best at the end, the newest included.
                self.save_total_limit = 2
        self.remove_unused_columns = False
        if self.gradient_checkpointing and self.gradient_checkpointing_kwargs is None:
            # The re-entrant kind needs inputs with gradients, which LoRA on frozen embeddings does not have.
            self.gradient_checkpointing_kwargs = {"use_reentrant": False}
        super().__post_init__()
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        if self.max_concurrent_rollouts is None:
            self.max_concurrent_rollouts = max(self.max_staleness, 1) * self.samples_per_step
        self._check_ranges()
        self._check_combinations()
        self._check_unsupported()

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step under a fixed batch; an estimate under a token budget."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def compute_dtype(self) -> str:
        """Name of the precision that forward and backward compute in."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else self.dtype

    @property
    def server_urls(self) -> list[str]:
        urls = self.vllm_server_base_url
        return [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]

    @property
    def attempt_path(self) -> Path:
        """Folder of the control file, the spool and the stored rollouts."""
        return Path(self.attempt_dir or str(self.output_dir))

    def _check_ranges(self) -> None:
        at_least = {
            "num_generations": 2, "max_completion_length": 1, "top_k": 0, "fork_threshold_tokens": 0, "num_sampler_logprobs": 1,
            "max_concurrent_rollouts": 1, "max_staleness": 0, "queue_maxsize": 1, "weight_sync_steps": 1,
            "max_generation_failures": 1, "beta": 0, "vllm_importance_sampling_clip_min": 0, "eval_num_generations": 1,
        }  # fmt: skip
        for name, lowest in at_least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {lowest}")
        above_zero = (
            "temperature", "repetition_penalty", "vllm_server_timeout", "request_timeout", "weight_sync_timeout", "epsilon",
            "epsilon_high", "heartbeat_stale_after_s", "reward_timeout", "tool_timeout",
        )  # fmt: skip
        for name in above_zero:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.max_epochs is not None and self.max_epochs <= 0:
            raise ValueError(f"max_epochs is {self.max_epochs}; it must be above 0, or None")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.eval_top_p is not None and not 0 < self.eval_top_p <= 1:
            raise ValueError(f"eval_top_p is {self.eval_top_p}; it must be above 0 and at most 1, or None")
        if self.eval_temperature is not None and self.eval_temperature < 0:
            raise ValueError(f"eval_temperature is {self.eval_temperature}; it must be at least 0, or None")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be between 0 and 1, or None")
        if self.epsilon >= 1:
            raise ValueError(f"epsilon is {self.epsilon}; it must be below 1")
        if self.vllm_importance_sampling_clip_max <= max(1.0, self.vllm_importance_sampling_clip_min):
            raise ValueError(
                f"vllm_importance_sampling_clip_max is {self.vllm_importance_sampling_clip_max}; it must be above 1 and above "
                f"vllm_importance_sampling_clip_min ({self.vllm_importance_sampling_clip_min})"
            )
        for name, allowed in (("loss_type", LOSS_TYPES), ("scale_rewards", SCALE_REWARDS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}")

    def _check_combinations(self) -> None:
        if self.max_steps <= 0 and self.lr_scheduler_type not in ENDLESS_SCHEDULES:
            schedule = SchedulerType(self.lr_scheduler_type).value
            raise ValueError(
                f"lr_scheduler_type {schedule!r} needs to know the number of steps; set max_steps, or use 'constant'"
            )
        if self.max_steps <= 0 and self.num_train_epochs <= 0:
            raise ValueError(f"num_train_epochs is {self.num_train_epochs}; set it above 0, or set max_steps")
        if self.fixed_batch and self.samples_per_step % self.num_generations:
            raise ValueError(
                f"an optimizer step holds {self.samples_per_step} samples (per_device_train_batch_size x "
                f"gradient_accumulation_steps x processes), which is not a multiple of num_generations {self.num_generations}"
            )
        if self.eval_steps is not None and (self.eval_steps < 1 or self.eval_steps % self.weight_sync_steps):
            raise ValueError(
                f"eval_steps is {self.eval_steps}; it must be a multiple of weight_sync_steps ({self.weight_sync_steps}), "
                "since the servers have the weights of those steps only"
            )
        if self.eval_at_start and self.eval_steps is None:
            raise ValueError("eval_at_start is on, but nothing is evaluated; set eval_steps")
        if self.metric_for_best_model is not None and self.eval_steps is None:
            raise ValueError(
                f"metric_for_best_model is {self.metric_for_best_model!r}, but nothing is evaluated; set eval_steps"
            )
        if self.metric_for_best_model not in (None, *EVAL_METRICS):
            raise ValueError(
                f"metric_for_best_model is {self.metric_for_best_model!r}; allowed are {', '.join(EVAL_METRICS)}"
            )
        if not self.server_urls:
            raise ValueError("vllm_server_base_url is empty; give the URL of at least one vLLM server")

    @property
    def fixed_batch(self) -> bool:
        """Whether a micro-batch has a fixed number of samples instead of a token budget."""
        return self.token_budget is not None and self.token_budget <= 0

    def _check_unsupported(self) -> None:
        parallelism = self.parallelism_config
        for axis in ("cp_size", "sp_size", "tp_size"):
            if parallelism is not None and (getattr(parallelism, axis, 1) or 1) > 1:
                raise ValueError(
                    f"parallelism_config has {axis} {getattr(parallelism, axis)}; rows are packed trees and cannot be cut "
                    "along the sequence, so only data parallelism is allowed (every other size 1)"
                )
        if self.deepspeed:
            raise NotImplementedError("deepspeed is not supported; use FSDP2 through accelerate launch")
        if self.use_liger_kernel:
            raise NotImplementedError("use_liger_kernel is not supported; the loss needs log-probabilities of its own")
        if self.auto_find_batch_size:
            raise NotImplementedError("auto_find_batch_size is not supported; lower token_budget to save memory")
        if self.eval_strategy not in ("no", "steps") or self.eval_on_start:
            raise NotImplementedError(
                "evaluation happens every eval_steps steps; leave eval_strategy and eval_on_start unset"
            )
        if self.load_best_model_at_end:
            raise NotImplementedError(
                "load_best_model_at_end is not supported; load the checkpoint of the step you want"
            )
        if self.neftune_noise_alpha is not None:
            raise NotImplementedError(
                "neftune_noise_alpha would make the trainer differ from the server; leave it unset"
            )
