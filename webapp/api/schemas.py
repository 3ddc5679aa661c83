"""What the API takes and gives. Field docs end up in the OpenAPI schema."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from ninja import Field, Path, Schema
from pydantic import ConfigDict

Id = Annotated[int, Path(ge=1, le=2**62)]
"""A number in a URL; larger ones would not fit the database."""


class Strict(Schema):
    """A request body: unknown keys are an error, so that a typo is not ignored."""

    model_config = ConfigDict(extra="forbid")


class Detail(Schema):
    """Every error: one sentence that says what was found and what is allowed."""

    detail: str


class ProblemOut(Schema):
    field: str = Field(description="Dotted path in the spec, '' for the spec as a whole.")
    message: str


class Problems(Detail):
    """422: `problems` has one sentence for each field."""

    problems: list[ProblemOut]


class SpecIn(Strict):
    """A run's spec, as JSON or as YAML text; exactly one of the two."""

    spec: dict[str, Any] | None = Field(None, description="The RunSpec as an object; see /api/spec/schema.")
    yaml: str | None = Field(None, description="The RunSpec as YAML text.", max_length=1_000_000)


class RunIn(SpecIn):
    launch: bool = Field(False, description="Queue it at once; otherwise it stays a draft.")


class StopIn(Strict):
    save: bool = Field(False, description="Save a checkpoint first.")


class ResumeIn(Strict):
    checkpoint: int | None = Field(
        None, ge=1, le=2**62, description="Id of one of the run's checkpoints; empty: newest."
    )


class ArchiveIn(Strict):
    archived: bool = True


class DescribeIn(Strict):
    """What names a run and steers nothing; what is left out stays."""

    name: str | None = Field(None, min_length=1, max_length=120)
    tags: list[str] | None = Field(None, max_length=50, description="All of them, in order.")
    notes: str | None = None


class CloneIn(SpecIn):
    """A changed spec, or nothing for an exact copy."""


class ForkIn(SpecIn):
    """A changed spec, or nothing for the same settings."""

    checkpoint: int | None = Field(
        None, ge=1, le=2**62, description="Id of one of the run's checkpoints; empty: newest."
    )
    launch: bool = Field(False, description="Queue it at once; otherwise it stays a draft.")


class RangeIn(Strict):
    """Numbers from `low` to `high`. A grid needs `points`; without them values are drawn, which `count` says how often."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    log: bool = Field(False, description="Even on a log scale.")
    points: int | None = Field(None, ge=2, le=200)


class SweepIn(Strict):
    """Many runs from one: every combination of the axes' values, or `count` of them by chance."""

    axes: dict[str, list[Any] | RangeIn] = Field(
        description="Values, or a range, by the dotted path of a setting, such as training.learning_rate or rewards.0.weight.",
        min_length=1,
        max_length=8,
    )
    count: int | None = Field(None, ge=1, le=200, description="Take this many combinations by chance; empty: all.")
    seed: int = Field(0, ge=0, le=2**31, description="Of that choice.")
    launch: bool = Field(False, description="Queue them at once; they run as devices become free.")
    name: str = Field("", max_length=120, description="Of the sweep; empty: made from the run's and the axes'.")
    metric: str = Field("reward", min_length=1, max_length=250, description="What the runs are compared by.")
    goal: Literal["max", "min"] = "max"


class TrialOut(Schema):
    """One run of a sweep. `final` is the newest value of the sweep's metric, `best` the best of all steps."""

    number: int
    run: UUID
    state: str
    place: dict[str, Any] = Field(description="Its values by the path of the setting.")
    final: float | None
    best: float | None


class SweepRow(Schema):
    id: UUID
    name: str
    owner: str
    base: UUID | None
    method: str = Field(description="'grid' or 'random'.")
    axes: dict[str, Any]
    metric: str
    goal: str
    created_at: datetime
    states: dict[str, int] = Field(description="Runs in each state.")
    url: str = Field(description="Its page.")


class SweepOut(SweepRow):
    trials: list[TrialOut]


class Stopped(Schema):
    stopped: int = Field(description="Runs that were asked to end.")


class RunRow(Schema):
    """A run in a list. `summary` has the latest step, reward, tok_s, staleness, time (Unix seconds) and max_steps."""

    id: UUID
    name: str
    owner: str
    state: str
    reason: str
    model: str
    tags: list[str]
    summary: dict[str, Any]
    archived: bool
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


class RunList(Schema):
    items: list[RunRow]
    total: int
    page: int
    pages: int
    states: dict[str, int] = Field(description="Runs in each state, whatever is filtered.")


class ServerOut(Schema):
    """A vLLM server of an attempt. `port` is one of the attempt's host, open to that machine alone."""

    number: int = Field(description="From 0, as in the name of its log.")
    state: str = Field(description="'starting', 'ready', 'failed' (it died too often) or 'ended'.")
    port: int
    restarts: int


class AttemptOut(Schema):
    id: UUID
    number: int
    state: str
    host: str | None
    hosts: list[str] = Field(description="All hosts of its trainer, `host` first.")
    resumed_from: int | None = Field(description="Id of a checkpoint.")
    server_restarts: int = Field(description="Of all its servers.")
    servers: list[ServerOut]
    exit_code: int | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None

    @staticmethod
    def resolve_host(attempt: Any) -> str | None:
        return attempt.host.name if attempt.host else None

    @staticmethod
    def resolve_servers(attempt: Any) -> list[Any]:
        return list(attempt.servers.all())

    @staticmethod
    def resolve_resumed_from(attempt: Any) -> int | None:
        return attempt.resumed_from_id


class DiagnosisOut(Schema):
    verdict: str
    sentence: str
    knob: str
    charts: list[str]


class RunOut(RunRow):
    parent: UUID | None
    sweep: UUID | None = Field(description="The sweep that it is a run of.")
    forked_step: int | None = Field(description="Step of the parent's checkpoint whose weights this run begins with.")
    desired: str
    live: bool
    spec: dict[str, Any]
    attempts: list[AttemptOut]
    diagnosis: DiagnosisOut
    url: str = Field(description="Its page.")


class SpecChecked(Schema):
    valid: bool
    problems: list[ProblemOut]
    spec: dict[str, Any] | None = Field(description="With all defaults filled in; empty when a field is wrong.")
    yaml: str | None


class EventOut(Schema):
    id: int
    attempt: int | None
    actor: str | None
    created_at: datetime
    step: int | None
    level: str
    name: str
    text: str
    data: dict[str, Any]

    @staticmethod
    def resolve_attempt(event: Any) -> int | None:
        return event.attempt.number if event.attempt else None

    @staticmethod
    def resolve_actor(event: Any) -> str | None:
        return event.actor.username if event.actor else None


class RolloutOut(Schema):
    id: int
    attempt: int
    step: int = Field(description="Weight version that began it.")
    group_id: str
    row_index: int
    reward: float | None
    trained_step: int | None = Field(description="Optimizer step that trained on it, once there was one.")
    staleness: int | None = Field(description="Weight updates between its beginning and its training.")
    created_at: datetime
    data: dict[str, Any]

    @staticmethod
    def resolve_attempt(rollout: Any) -> int:
        return rollout.attempt.number


class TokensOut(Schema):
    """One sequence from its first trained token on. Numbers are those of trained tokens, in order."""

    sequence: int
    advantage: float
    left_out: int = Field(description="Tokens at the end that are not stored.")
    text: list[str]
    mask: str = Field(
        description="A letter a token: t trained, o left out of the loss for its ratio, a dot for context."
    )
    log_probs: list[float | None] = Field(description="The sampler's.")
    ratio: list[float | None] = Field(description="The trainer's probability over the sampler's.")
    entropy: list[float | None] = Field(description="Of the trainer's distribution, in nats.")


class FileOut(Schema):
    name: str
    size: int
    part: str = Field(description="'model': needed to use it; 'resume': optimizer state and the like.")
    url: str


class CheckpointOut(Schema):
    id: int
    run: UUID
    attempt: int
    step: int
    kind: str = Field(description="'adapter' or 'full'.")
    size_bytes: int
    reward: float | None = Field(description="The run's reward when it was saved.")
    evaluation: dict[str, float] = Field(description="What was measured at its step, by metric; empty: nothing.")
    best: bool = Field(description="The best evaluation of the run that has a checkpoint, by checkpoints.keep_best_by.")
    created_at: datetime
    deleted_at: datetime | None
    files: list[FileOut]
    zip_url: str = Field(description="What is needed to use the model, as one zip.")


class ExportOut(Schema):
    """Something that is made of a checkpoint by a worker."""

    id: int
    kind: str = Field(description="'merge' or 'push'.")
    state: str = Field(description="'queued', 'running', 'done' or 'failed'.")
    text: str = Field(description="How far it is, or why it failed.")
    share: float = Field(description="How much of it is done, 0 to 1.")
    size_bytes: int
    repo: str
    url: str = Field(description="Where the result is, once it is there.")
    created_at: datetime
    ended_at: datetime | None


class PushIn(Strict):
    repo: str = Field(max_length=200, description="Name on the hub, such as your-name/my-model.")
    private: bool = True
    merged: bool = Field(False, description="The merged weights instead of the adapter.")


class Freed(Schema):
    freed_bytes: int


class LogFile(Schema):
    attempt: int
    name: str
    size: int


class LogPiece(Schema):
    """Part of a log: whole lines from byte `start` to `end` of `size`; `partial` is a line still being written."""

    start: int
    end: int
    size: int
    text: str
    partial: str


class ImportIn(Strict):
    """A run that was trained elsewhere."""

    name: str = Field(min_length=1, max_length=120)
    source: str = Field(min_length=1, max_length=40, description="Where it comes from, such as wandb.")
    config: dict[str, Any] = Field({}, description="Its settings, kept as they are.")
    tags: list[str] = []
    started_at: datetime | None = None
    ended_at: datetime | None = None
    failed: bool = False


class Imported(Schema):
    id: UUID
    url: str = Field(description="Its page.")


class Stored(Schema):
    offset: int = Field(description="Bytes stored so far: where the next batch begins.")


class RewardIn(Strict):
    source: str = Field(description="Python; its last top-level function is the reward, and names it.")
    description: str = Field("", max_length=10_000)


class VersionIn(Strict):
    source: str
    note: str = Field("", max_length=200)


class TestIn(Strict):
    source: str
    prompt: str = ""
    completions: list[str] = Field([], max_length=512)
    columns: dict[str, Any] = Field({}, description="Dataset columns; each value is given for every completion.")
    run: UUID | None = Field(None, description="Score this run's stored rollouts instead.")
    step: int | None = Field(
        None, ge=-(2**62), le=2**62, description="Weight version of those; the newest when left out."
    )


class SandboxError(Schema):
    type: str
    message: str
    line: int | None
    traceback: str


class TestOut(Schema):
    """`values` has one list for each call that succeeded; `level` says what the sandbox was made of."""

    values: list[list[float | None]]
    seconds: list[float]
    output: str
    error: SandboxError | None
    level: str


class VersionOut(Schema):
    number: int
    sha256: str
    note: str
    created_by: str
    created_at: datetime
    source: str

    @staticmethod
    def resolve_created_by(version: Any) -> str:
        return version.created_by.username


class RewardOut(Schema):
    name: str
    builtin: bool
    description: str
    versions: list[int]


class RewardDetail(RewardOut):
    owner: str | None
    newest: VersionOut | None


class DeviceOut(Schema):
    uuid: str
    kind: str
    index: int
    name: str
    memory_mib: int
    util: float | None = Field(description="Percent. This and the next three are of the whole GPU; null: not told.")
    memory_used_mib: int | None
    temperature_c: float | None
    power_w: float | None
    present: bool
    run: UUID | None = Field(description="The run that holds it.")


class HostOut(Schema):
    name: str
    address: str = Field(description="Where other hosts reach it.")
    alive: bool
    drained: bool
    cpu_count: int
    memory_mib: int
    load: float | None = Field(description="Processes that run or want to, mean of a minute.")
    memory_free_mib: int | None
    disk_mib: int | None = Field(description="The disk that holds the runs.")
    disk_free_mib: int | None
    last_seen_at: datetime | None = Field(description="When it reported all of this.")
    devices: list[DeviceOut]


class MeOut(Schema):
    username: str
    admin: bool
    role: str = Field(description="'viewer', 'runner', 'author', 'runner+author' or 'admin'.")
    reads_only: bool = Field(description="Whether this token may only read.")


class ReportIn(Strict):
    title: str = Field(min_length=1, max_length=160, pattern=r"^[^\x00]*$")
    text: str = Field(min_length=1, max_length=200_000, pattern=r"^[^\x00]*$", description="Markdown.")


class ReportRow(Schema):
    id: UUID
    title: str
    owner: str
    created_at: datetime
    changed_at: datetime
    url: str = Field(description="Its page.")


class ReportOut(ReportRow):
    text: str
    runs: list[UUID] = Field(description="Runs that its charts show.")
    problems: list[str] = Field(description="Why a chart can't be drawn, a sentence each.")


class AuditEntryOut(Schema):
    """Something that somebody did. `actor_name` is empty when nobody was signed in."""

    id: int
    at: datetime
    actor_name: str
    action: str
    target: str
    target_id: str
    text: str
    address: str
    via: str = Field(description="Name of the API token; empty for a browser.")


class HealthOut(Schema):
    status: str
