"""Where a run's metrics go besides Offbeat."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from trainer_core.spec.section import ADVANCED, Section

EXPORTERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Names of exporters, and the package that each needs on the training host."""


class ExporterSpec(Section):
    """Other trackers that get the metrics as well. One that fails or hangs is left behind, and training goes on."""

    targets: list[str] = Field(
        default_factory=list, title="Export to",
        description="Names, separated by commas: tensorboard, wandb, trackio, mlflow. wandb needs the secret WANDB_API_KEY.",
    )  # fmt: skip
    project: str = Field(
        "offbeat", min_length=1, max_length=120, title="Project", json_schema_extra=ADVANCED,
        description="Project of wandb and trackio, experiment of MLflow. The run's name becomes the name there.",
    )  # fmt: skip
    mlflow_url: str = Field(
        "", title="MLflow server", json_schema_extra=ADVANCED,
        description="http(s)://...; empty: MLFLOW_TRACKING_URI of the training host, or else a file in the run's folder.",
    )  # fmt: skip

    @field_validator("targets")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in EXPORTERS:
                raise ValueError(f"{name[:80]!r} is no exporter; there are {', '.join(EXPORTERS)}")
        return list(dict.fromkeys(names))

    @field_validator("mlflow_url")
    @classmethod
    def _reachable(cls, url: str) -> str:
        if url and not re.fullmatch(r"https?://\S+", url):
            raise ValueError(f"found {url[:80]!r}; http://... or https://... is needed, or nothing")
        return url
