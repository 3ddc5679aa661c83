"""How completions come about: sampling, tools and environment."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trainer_core.spec.section import ADVANCED, Section


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
    max_generation_failures: int = Field(
        10, ge=1, title="Failures in a row", json_schema_extra=ADVANCED,
        description="When so many rollouts fail one after another, the run fails with the last error.",
    )  # fmt: skip
    heartbeat_stale_after_s: float = Field(
        300.0, ge=10, title="Silence allowed (s)", json_schema_extra=ADVANCED,
        description="A rollout process that says nothing for so long counts as hung, and the run fails.",
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
    fork_threshold_tokens: int = Field(
        1024, ge=0, title="Fork threshold (tokens)", json_schema_extra=ADVANCED,
        description="Where the chat template writes earlier turns anew, fewer changed tokens than this leave the loss; more "
        "begin a sequence of their own.",
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, title="Chat template options", json_schema_extra=ADVANCED,
        description="Arguments of the model's chat template, as YAML, e.g. {enable_thinking: false}.")  # fmt: skip
