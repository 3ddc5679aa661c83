"""What comes of a run: evaluations and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer_core.spec.section import ADVANCED, Section


class EvaluationSpec(Section):
    """How the model does on prompts that it is not trained on. Training waits while the server answers them."""

    every_steps: int | None = Field(
        None, ge=1, title="Evaluate every (steps)", description="Optimizer steps between two evaluations; empty: none."
    )
    source: str = Field(
        "", title="Evaluation dataset",
        description="As the dataset of training; empty: the same reasoning-gym task with the seed below.",
    )  # fmt: skip
    config: str = Field(
        "", title="Configuration", json_schema_extra=ADVANCED,
        description="Of a hub dataset that has several; empty: as in training where the dataset is the same.",
    )  # fmt: skip
    split: str = Field("test", title="Split", description="Split of a hub dataset.", json_schema_extra=ADVANCED)
    rename_columns: dict[str, str] = Field(
        default_factory=dict, title="Rename columns", json_schema_extra=ADVANCED,
        description="As YAML, e.g. {question: prompt}; empty: as in training.",
    )  # fmt: skip
    size: int = Field(50, ge=1, title="Generated rows", description="How many rows a reasoning-gym generator makes.")
    seed: int = Field(4242, title="Evaluation seed", description="Seed of the generator; differs from the data seed.")
    num_generations: int = Field(
        1,
        ge=1,
        le=512,
        title="Rollouts per prompt",
        description="k of pass@k, the share of prompts solved at least once; below it pass@2, pass@4, ... are estimated.",
    )
    at_start: bool = Field(
        False, title="Evaluate before training", description="One more evaluation at step 0, to compare with."
    )
    pass_above: float = Field(
        0.0, title="Passes above", allow_inf_nan=False, json_schema_extra=ADVANCED,
        description="A rollout passes when its reward is above this.",
    )  # fmt: skip
    temperature: float | None = Field(
        None, ge=0, le=10, title="Temperature", json_schema_extra=ADVANCED,
        description="Empty: as in training; 0 always takes the most likely token.",
    )  # fmt: skip
    top_p: float | None = Field(
        None, gt=0, le=1, title="Top-p", json_schema_extra=ADVANCED, description="Empty: as in training."
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
