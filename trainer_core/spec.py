"""RunSpec: what a run is. The new-run form, the API, YAML files and the trainer all read this one model.

Field titles and descriptions are the form's labels and help texts. `json_schema_extra={"advanced": True}` folds a field
away. Light on purpose: pydantic and PyYAML only, so that the web app can import it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict

ADVANCED: JsonDict = {"advanced": True}
SECRET_NAME = (
    r"(?!OFFBEAT_|VLLM_|DJANGO_|CELERY_|NCCL_|CUDA_)[A-Z][A-Z0-9_]*"
    r"_(?:KEY|TOKEN|SECRET|PASSWORD|ID|USER|USERNAME|CREDENTIALS)"
)
"""Environment variables that a run may ask for: by their ends, so that none can be one that steers a program."""
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of all sections: unknown keys are an error, so that a typo in YAML is not silently ignored."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())


class ModelSpec(Section):
    """The model to train."""

    path: str = Field(
        "smollm2-135m-instruct",
        title="Model",
        min_length=1,
        description="A Hugging Face hub id, a local folder, or 'smollm2-135m-instruct', which ships with Offbeat.",
    )
    dtype: Dtype = Field("float32", title="Trainer dtype", description="Precision of the weights that are trained.")
    trust_remote_code: bool = Field(
        False, title="Trust remote code", description="Allow model code from the hub.", json_schema_extra=ADVANCED
    )


class DataSpec(Section):
    """Where prompts come from. Each row needs a 'prompt' column: text, or a list of chat messages."""

    source: str = Field(
        "reasoning_gym:products",
        title="Dataset",
        min_length=1,
        description="'reasoning_gym:<task>', a hub dataset id, or a .jsonl, .csv or .parquet file on the training host.",
    )
    split: str = Field("train", title="Split", description="Split of a hub dataset.", json_schema_extra=ADVANCED)
    size: int = Field(1000, ge=1, title="Generated rows", description="How many rows a reasoning-gym generator makes.")
    seed: int = Field(42, title="Data seed", description="Seed of the generator and of the shuffle.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        title="Generator options",
        description="Keyword arguments of the reasoning-gym generator, as YAML, e.g. {max_digits: 1}.",
    )
    prompt_suffix: str = Field(
        "", title="Prompt suffix", description="Text appended to each text prompt, e.g. 'Answer with a number only.'"
    )
    shuffle: bool = Field(True, title="Shuffle", description="Shuffle rows anew in each epoch, from the data seed.")
    streaming: bool = Field(
        False, title="Stream", json_schema_extra=ADVANCED, description="Read rows one after another instead of preparing "
        "all of them first. Shuffles within 1,000 rows, and a resumed run begins at the first row again.")  # fmt: skip

    @model_validator(mode="after")
    def _streams_rows(self) -> DataSpec:
        if self.streaming and self.source.startswith("reasoning_gym:"):
            raise ValueError(
                "data.streaming is for files and hub datasets; a reasoning-gym task is generated, so leave it off"
            )
        return self


class RewardSpec(Section):
    """One reward function of a run: a built-in, or a version of a function written in the studio."""

    name: str = Field(
        "last_number_match",
        title="Reward function",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=80,
        description="Name of a built-in reward, or of a reward function written in the studio.",
    )
    version: int | None = Field(
        None, ge=1, title="Version", description="Version of a studio function; empty for a built-in."
    )
    weight: float = Field(1.0, title="Weight", allow_inf_nan=False, description="Factor of this reward in the sum.")


class RolloutSpec(Section):
    """How completions are sampled, and how far generation may run ahead of training."""

    num_generations: int = Field(
        8,
        ge=2,
        le=512,
        title="Rollouts per prompt",
        description="Size of a group, which shares one advantage baseline.",
    )
    max_completion_length: int = Field(
        2048, ge=1, title="Max completion tokens", description="Tokens generated in a whole rollout, over all turns."
    )
    temperature: float = Field(1.0, gt=0, le=10, title="Temperature", description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, title="Top-p", json_schema_extra=ADVANCED,
                         description="Nucleus sampling; 1 turns it off. Needs top-k, too.")  # fmt: skip
    top_k: int = Field(0, ge=0, title="Top-k", description="0 samples from all tokens.", json_schema_extra=ADVANCED)
    min_p: float | None = Field(None, ge=0, le=1, title="Min-p", json_schema_extra=ADVANCED, description="Minimum "
                                "probability relative to the most likely token; empty: off. Needs top-k, too.")  # fmt: skip
    repetition_penalty: float = Field(
        1.0, gt=0, title="Repetition penalty", description="1 turns it off.", json_schema_extra=ADVANCED
    )
    max_staleness: int = Field(
        4, ge=0, le=1000, title="Max staleness",
        description="Weight updates a sample may lag behind the trainer. 0 makes the run synchronous.",
    )  # fmt: skip
    max_concurrent_rollouts: int | None = Field(
        None, ge=1, title="Max concurrent rollouts", json_schema_extra=ADVANCED,
        description="Ceiling of rollouts in flight; empty: max(max_staleness, 1) x samples of an optimizer step.",
    )  # fmt: skip
    queue_maxsize: int = Field(
        1024, ge=1, title="Queue size", description="Scored samples buffered.", json_schema_extra=ADVANCED
    )
    reward_timeout: float = Field(
        60.0, gt=0, le=3600, title="Reward timeout (s)", json_schema_extra=ADVANCED,
        description="One scoring call; a slower one is killed and its samples are unscorable.",
    )  # fmt: skip


class AgentSpec(Section):
    """What the model may do besides talking. Calls are read in the form that the model's chat template teaches."""

    tools: list[str] = Field(
        default_factory=list, title="Tools", description="Names, separated by commas: calculator, one that is installed on "
        "the training host, or module:function where its operator allows the module.")  # fmt: skip
    environment: str = Field(
        "", title="Environment", description="Its methods are tools, and it may score a rollout: guess_number, openenv, one "
        "that is installed on the training host, or module:name.")  # fmt: skip
    environment_options: dict[str, Any] = Field(
        default_factory=dict, title="Environment options", description="Keyword arguments of the environment, as YAML, e.g. "
        "{base_url: 'http://host:8000'} of openenv.")  # fmt: skip
    max_tool_calling_iterations: int | None = Field(
        None, ge=1, title="Max turns with calls", description="Empty: until the completion's token limit.",
        json_schema_extra=ADVANCED)  # fmt: skip
    tool_timeout: float = Field(
        60.0, gt=0, le=3600, title="Tool timeout (s)", json_schema_extra=ADVANCED,
        description="One call of a tool or an environment; a slower one is given up.")  # fmt: skip
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, title="Chat template options", json_schema_extra=ADVANCED,
        description="Arguments of the model's chat template, as YAML, e.g. {enable_thinking: false}.")  # fmt: skip


LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "gspo"]


class TrainingSpec(Section):
    """The optimizer step."""

    max_steps: int = Field(
        200, ge=1, le=10_000_000, title="Optimizer steps", description="The run ends after this many steps."
    )
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
    weight_sync_steps: int = Field(
        1, ge=1, title="Steps between weight pushes", description="1 keeps the server as fresh as possible."
    )
    seed: int = Field(42, ge=0, title="Seed", description="Seed of initialisation and sampling.")


class LoraSpec(Section):
    """Train a LoRA adapter instead of all weights."""

    enabled: bool = Field(True, title="LoRA", description="Train a low-rank adapter; off trains all weights.")
    r: int = Field(16, ge=1, le=512, title="Rank", description="Rank of the adapter.")
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


class ServerSpec(Section):
    """The vLLM server that generates."""

    max_model_len: int = Field(
        4096, ge=16, title="Context length", description="Prompt and completion together, in tokens."
    )
    dtype: Dtype = Field("bfloat16", title="Server dtype", description="Precision the server generates in.")
    kv_cache_gib: float | None = Field(
        None, gt=0, title="KV cache (GiB)", description="Size of the KV cache; empty: a share of the device's memory "
        "on a GPU, 1 GiB on a CPU.", json_schema_extra=ADVANCED)  # fmt: skip
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, title="GPU memory share", description="Share of the GPU (of its slot, where runs share a GPU) the "
        "server may take.",
        json_schema_extra=ADVANCED)  # fmt: skip
    max_num_seqs: int | None = Field(
        None, ge=1, title="Max sequences in a batch", description="Empty: vLLM's default.", json_schema_extra=ADVANCED
    )
    enforce_eager: bool = Field(False, title="Eager mode", description="Start faster, generate slower. Always on for "
                                "a CPU.", json_schema_extra=ADVANCED)  # fmt: skip
    startup_timeout: float = Field(
        600.0, gt=0, title="Start-up timeout (s)", description="How long the server may take to be ready.",
        json_schema_extra=ADVANCED)  # fmt: skip
    max_restarts: int = Field(3, ge=0, title="Restarts", description="How often a server that died is started again "
                              "in one attempt.", json_schema_extra=ADVANCED)  # fmt: skip


class ResourceSpec(Section):
    """Devices of the run. On a host without a GPU one CPU slot is taken instead."""

    rollout_gpus: int = Field(1, ge=1, le=64, title="Rollout GPUs", description="GPUs of the vLLM server.")
    trainer_gpus: int = Field(
        1,
        ge=1,
        le=64,
        title="Trainer GPUs",
        description="GPUs of the trainer, one process each; the model is sharded over them.",
    )
    cpu_ranks: int = Field(
        1,
        ge=1,
        le=8,
        title="Trainer processes on a CPU",
        json_schema_extra=ADVANCED,
        description="Only for trying out several trainer processes on a host without a GPU, where GPU counts mean nothing.",
    )


class CheckpointSpec(Section):
    """What is kept."""

    keep_best_by: Literal["eval/reward", "eval/pass@1", "eval/pass@k"] | None = Field(
        None, title="Keep the best by", description="The checkpoint with the best value of this evaluation metric is saved "
        "when it is found, and kept beside the newest ones; empty: none.")  # fmt: skip

    save_steps: int = Field(50, ge=1, title="Save every (steps)", description="A checkpoint each this many steps, and "
                            "at the end.")  # fmt: skip
    save_total_limit: int | None = Field(
        None, ge=1, title="Keep at most", description="Older checkpoints are deleted; empty keeps all."
    )


class EvaluationSpec(Section):
    """How the model does on prompts that it is not trained on. Training waits while the server answers them."""

    every_steps: int | None = Field(
        None, ge=1, title="Evaluate every (steps)", description="Optimizer steps between two evaluations; empty: none."
    )
    source: str = Field(
        "", title="Evaluation dataset",
        description="As the dataset of training; empty: the same reasoning-gym task with the seed below.",
    )  # fmt: skip
    split: str = Field("test", title="Split", description="Split of a hub dataset.", json_schema_extra=ADVANCED)
    size: int = Field(50, ge=1, title="Generated rows", description="How many rows a reasoning-gym generator makes.")
    seed: int = Field(4242, title="Evaluation seed", description="Seed of the generator; differs from the data seed.")
    num_generations: int = Field(
        1,
        ge=1,
        le=512,
        title="Rollouts per prompt",
        description="k of pass@k, the share of prompts solved at least once.",
    )


class RunSpec(Section):
    """What a run is.

    Raises pydantic.ValidationError, whose messages name the field, what was found and what is allowed.
    """

    name: Annotated[str, Field(min_length=1, max_length=120)] = Field(
        "run", title="Name", description="How the run is listed; need not be unique."
    )
    tags: list[str] = Field(default_factory=list, title="Tags", description="Words to find the run by.")
    notes: str = Field("", title="Notes", description="Why this run? Shown on its page.")
    secrets: list[str] = Field(
        default_factory=list, max_length=32, title="Secrets", json_schema_extra=ADVANCED, description="Names of stored "
        "secrets that server and trainer get as environment variables, such as HF_TOKEN.")  # fmt: skip
    model: ModelSpec = Field(default_factory=ModelSpec, title="Model")
    data: DataSpec = Field(default_factory=DataSpec, title="Data")
    rewards: list[RewardSpec] = Field(
        default_factory=lambda: [RewardSpec()],
        title="Rewards",
        description="At least one, unless an environment scores.",
    )
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, title="Rollouts")
    agent: AgentSpec = Field(default_factory=AgentSpec, title="Tools and environment")
    training: TrainingSpec = Field(default_factory=TrainingSpec, title="Training")
    lora: LoraSpec = Field(default_factory=LoraSpec, title="LoRA")
    server: ServerSpec = Field(default_factory=ServerSpec, title="Server")
    resources: ResourceSpec = Field(default_factory=ResourceSpec, title="Devices")
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec, title="Evaluation")
    checkpoints: CheckpointSpec = Field(default_factory=CheckpointSpec, title="Checkpoints")

    @field_validator("secrets")
    @classmethod
    def _secret_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(SECRET_NAME, name):
                raise ValueError(f"{name[:80]!r} is no name of a secret; one is like HF_TOKEN or WANDB_API_KEY")
        return list(dict.fromkeys(names))

    @field_validator("name", "notes")
    @classmethod
    def _printable(cls, text: str) -> str:
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
            raise ValueError("contains control characters; printable text is allowed")
        return text

    @field_validator("rewards")
    @classmethod
    def _distinct_rewards(cls, rewards: list[RewardSpec]) -> list[RewardSpec]:
        names = [reward.name for reward in rewards]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"reward {', '.join(repeated)} is listed more than once; list each once, with a weight")
        return rewards

    @model_validator(mode="after")
    def _scored(self) -> RunSpec:
        if not self.rewards and not self.agent.environment:
            raise ValueError("rewards is empty; list at least one reward, or name an environment that scores")
        if self.agent.environment_options and not self.agent.environment:
            raise ValueError("agent.environment_options are given, but agent.environment is empty; name an environment")
        return self

    @model_validator(mode="after")
    def _fits_context(self) -> RunSpec:
        if self.rollout.max_completion_length >= self.server.max_model_len:
            raise ValueError(
                f"rollout.max_completion_length is {self.rollout.max_completion_length}, which leaves no room for a prompt "
                f"in server.max_model_len {self.server.max_model_len}; make it smaller, or the context longer"
            )
        return self

    @model_validator(mode="after")
    def _bounded_support(self) -> RunSpec:
        rollout = self.rollout
        if (rollout.top_p < 1 or rollout.min_p) and not rollout.top_k:
            name, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("min_p", rollout.min_p)
            raise ValueError(
                f"rollout.{name} is {value} and rollout.top_k is 0; the trainer normalises over the tokens that sampling "
                "leaves, and top_k bounds their number, so set it as well (64, say)"
            )
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> RunSpec:
        budget = self.training.token_budget
        if budget is not None and budget <= 0 and self.samples_per_step % self.rollout.num_generations:
            raise ValueError(
                f"an optimizer step holds {self.samples_per_step} samples (samples per micro-batch x accumulation x "
                f"trainer devices), which is not a multiple of {self.rollout.num_generations} rollouts per prompt"
            )
        return self

    @model_validator(mode="after")
    def _held_out(self) -> RunSpec:
        every, generated = self.evaluation.every_steps, self.data.source.startswith("reasoning_gym:")
        if every is None:
            if self.checkpoints.keep_best_by:
                raise ValueError(
                    f"checkpoints.keep_best_by is {self.checkpoints.keep_best_by}, but nothing is evaluated; set "
                    "evaluation.every_steps, or leave it empty"
                )
            return self
        if not self.evaluation.source and not generated:
            raise ValueError(
                "evaluation.source is empty; name a dataset to evaluate on, other than the one of training"
            )
        if not self.evaluation.source and self.evaluation.seed == self.data.seed:
            raise ValueError(f"evaluation.seed is {self.data.seed}, as data.seed; another one makes other prompts")
        if every % self.training.weight_sync_steps:
            raise ValueError(
                f"evaluation.every_steps is {every}, which is not a multiple of training.weight_sync_steps "
                f"{self.training.weight_sync_steps}; the server has the weights of those steps only"
            )
        return self

    def evaluation_data(self) -> DataSpec | None:
        """Where evaluation prompts come from; None without evaluation. Options and suffix are those of training."""
        wanted = self.evaluation
        if wanted.every_steps is None:
            return None
        source = wanted.source or self.data.source
        options = self.data.options if source.startswith("reasoning_gym:") else {}
        changes = {
            "source": source,
            "options": options,
            "split": wanted.split,
            "size": wanted.size,
            "seed": wanted.seed,
            "streaming": False,
        }
        return self.data.model_copy(update=changes)

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step under a fixed batch; an estimate under a token budget."""
        training = self.training
        return training.per_device_train_batch_size * training.gradient_accumulation_steps * self.resources.trainer_gpus

    def to_yaml(self) -> str:
        """The spec as YAML; `from_yaml` gives back an equal spec."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_yaml(cls, text: str) -> RunSpec:
        """Parse YAML or JSON.

        Raises ValueError with one sentence when the text is no mapping; pydantic.ValidationError (a ValueError) when a
        field is wrong.
        """
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise ValueError(
                f"found {type(data).__name__} at the top; a mapping of sections (model, data, ...) is expected"
            )
        return cls.model_validate(data)
