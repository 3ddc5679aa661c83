"""Messages between the trainer and its rollout worker. All are picklable; each names its direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class WeightsPushed:
    """trainer -> worker: the servers now generate with this version, under this model name."""

    version: int
    model_name: str


@dataclass
class GroupConsumed:
    """trainer -> worker: all samples of a group left the queue; its admission slot is free.

    `samples` counts those that are trained on, without the ones dropped as stale.
    """

    group_id: str
    samples: int


@dataclass
class ServersReady:
    """trainer -> worker: the current weights are on these servers, after a restart of some; they may generate."""

    urls: list[str]


@dataclass
class ServersAway:
    """trainer -> worker: these servers did not answer a push and have old weights; ask them nothing until they are ready."""

    urls: list[str]


@dataclass
class EvaluationRequested:
    """trainer -> worker: evaluate at this step, on the evaluation rows, without touching training order."""

    step: int


@dataclass
class Stop:
    """trainer -> worker: finish up and exit."""


@dataclass
class WorkerMetrics:
    """worker -> trainer: values for the metric table; pairs are (numerator, denominator)."""

    values: dict[str, list[float | tuple[float, float]]]


@dataclass
class GroupDropped:
    """worker -> trainer: a prompt that will give no sample this epoch but counts towards it."""

    row_index: int
    epoch: int
    reason: Literal["zero_variance", "unscorable", "filtered", "failed", "too_long", "stale"]


@dataclass
class EvaluationDone:
    """worker -> trainer: metrics of an evaluation by name, empty when nothing was scored.

    `unscored` of the `rollouts` that were asked for could not be generated or scored, and are left out of `values`.
    """

    step: int
    values: dict[str, float]
    rollouts: int
    unscored: int
    seconds: float


@dataclass
class WorkerEvent:
    """worker -> trainer: goes to the spool as an event."""

    level: Literal["info", "warning", "error"]
    name: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class ServerLost:
    """worker -> trainer: the server at this URL stopped answering. Dispatch is on hold while no other one answers."""

    url: str


@dataclass
class ServerBack:
    """worker -> trainer: it answers again, with fresh weights; push the current ones, then send ServersReady."""

    url: str


@dataclass
class WorkerFailed:
    """worker -> trainer: the worker gives up; `text` is one sentence, `traceback` the details."""

    text: str
    traceback: str
