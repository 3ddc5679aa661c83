"""RunSpec: all sections, what must hold between them, and YAML."""

from __future__ import annotations

import re
from typing import Annotated

import yaml
from pydantic import Field, field_validator, model_validator

from trainer_core.spec.exporters import ExporterSpec
from trainer_core.spec.inputs import REASONING_GYM, DataSpec, ModelSpec, RewardSpec
from trainer_core.spec.outcome import CheckpointSpec, EvaluationSpec
from trainer_core.spec.rollouts import AgentSpec, RolloutSpec
from trainer_core.spec.section import ADVANCED, Section
from trainer_core.spec.serving import ResourceSpec, ServerSpec
from trainer_core.spec.training import LoraSpec, TrainingSpec

SECRET_NAME = (
    r"(?!OFFBEAT_|VLLM_|DJANGO_|CELERY_|NCCL_|CUDA_)[A-Z][A-Z0-9_]*"
    r"_(?:KEY|TOKEN|SECRET|PASSWORD|ID|USER|USERNAME|CREDENTIALS)"
)
"""Environment variables that a run may ask for: by their ends, so that none can be one that steers a program."""
SECRET_NAME_ALLOWED = (
    "capitals, digits and underscores are allowed, with _KEY, _TOKEN, _SECRET, _PASSWORD, _ID, _USER, _USERNAME or "
    "_CREDENTIALS at the end, and none of OFFBEAT_, VLLM_, DJANGO_, CELERY_, NCCL_ and CUDA_ in front"
)
"""SECRET_NAME in words, for whoever is refused."""


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
    exporters: ExporterSpec = Field(default_factory=ExporterSpec, title="Exporters")

    @field_validator("secrets")
    @classmethod
    def _secret_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(SECRET_NAME, name):
                raise ValueError(f"found the name {name[:80]!r}; {SECRET_NAME_ALLOWED}")
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
    def _pushed_somehow(self) -> RunSpec:
        if self.server.api_servers > 1 and self.lora.enabled and self.lora.push == "adapter":
            raise ValueError(
                f"server.api_servers is {self.server.api_servers} and lora.push is adapter; a vLLM server takes new adapters "
                "with one API server only, so set lora.push to merged or auto"
            )
        return self

    @model_validator(mode="after")
    def _all_servers_busy(self) -> RunSpec:
        most, servers = self.rollout.max_concurrent_rollouts, self.resources.server_replicas
        if most is not None and most < servers:
            raise ValueError(
                f"rollout.max_concurrent_rollouts is {most} and resources.server_replicas is {servers}, so some servers would "
                "never be asked; allow at least one rollout for each server, or take fewer servers"
            )
        return self

    @model_validator(mode="after")
    def _countable(self) -> RunSpec:
        if self.data.streaming and self.training.max_epochs is not None:
            raise ValueError(
                f"training.max_epochs is {self.training.max_epochs:g}, but a stream does not say how many rows it has; leave "
                "it empty, or turn data.streaming off"
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
        every, generated = self.evaluation.every_steps, self.data.is_generated
        if every is None:
            if self.evaluation.at_start:
                raise ValueError("evaluation.at_start is on, but nothing is evaluated; set evaluation.every_steps")
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

    @property
    def builtin_rewards(self) -> list[str]:
        """Names of the reward functions that come with Offbeat."""
        return [reward.name for reward in self.rewards if reward.version is None]

    def evaluation_data(self) -> DataSpec | None:
        """Where evaluation prompts come from; None without evaluation.

        Options and suffix are those of training, and so are new names of columns unless evaluation has its own.
        """
        wanted = self.evaluation
        if wanted.every_steps is None:
            return None
        source = wanted.source or self.data.source
        generated, like_training = source.startswith(REASONING_GYM), self.data.is_generated
        options = self.data.options if generated else {}
        inherited = self.data.rename_columns if generated == like_training else {}
        changes = {
            "source": source,
            "options": options,
            "config": wanted.config or (self.data.config if source == self.data.source else ""),
            "split": wanted.split,
            "rename_columns": wanted.rename_columns or inherited,
            "size": wanted.size,
            "seed": wanted.seed,
            "streaming": False,
        }
        return self.data.model_copy(update=changes)

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step under a fixed batch; an estimate under a token budget."""
        training, ranks = self.training, self.resources.ranks(on_cpu=False)
        return training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks

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
