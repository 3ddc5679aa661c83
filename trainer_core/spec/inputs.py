"""What a run begins with: the model, the prompts and the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from trainer_core.spec.section import ADVANCED, Dtype, Section

REASONING_GYM = "reasoning_gym:"
"""What the source of a generated dataset begins with; the task follows."""


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
    config: str = Field(
        "", title="Configuration",
        description="Of a hub dataset that has several, e.g. main of openai/gsm8k; empty: its default one.",
    )  # fmt: skip
    split: str = Field("train", title="Split", description="Split of a hub dataset.", json_schema_extra=ADVANCED)
    rename_columns: dict[str, str] = Field(
        default_factory=dict, title="Rename columns", description="As YAML, the dataset's name first: {question: prompt} "
        "makes its column 'question' the prompt. Rewards get the new names.")  # fmt: skip
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
        if self.streaming and self.is_generated:
            raise ValueError(
                "data.streaming is for files and hub datasets; a reasoning-gym task is generated, so leave it off"
            )
        return self

    @property
    def is_generated(self) -> bool:
        """Whether a reasoning-gym task makes the rows, rather than a file or the hub."""
        return self.source.startswith(REASONING_GYM)

    def stored_name(self, column: str) -> str:
        """What the dataset itself calls a column of the run."""
        return next((old for old, new in self.rename_columns.items() if new == column), column)

    def names_after(self, columns: Sequence[str]) -> dict[str, str]:
        """What the columns of the dataset, as it is stored, are called in the run; in the same order.

        Raises ValueError with one sentence when `rename_columns` names a column that is not there, or two would share a name.
        """
        found = ", ".join(columns) or "none"
        if missing := [name for name in self.rename_columns if name not in columns]:
            raise ValueError(f"dataset {self.source} has no column {missing[0]!r} to rename; its columns are: {found}")
        after = {name: self.rename_columns.get(name, name) for name in columns}
        names = list(after.values())
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"renaming gives dataset {self.source} two columns {twice!r}; its columns are: {found}; give the other one a "
                "new name as well"
            )
        return after


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
        None, ge=1, title="Version", description="Version of a studio function; empty: the newest, or a built-in."
    )
    weight: float = Field(1.0, title="Weight", allow_inf_nan=False, description="Factor of this reward in the sum.")
