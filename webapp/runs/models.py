"""Runs, their attempts and what happened to them. State changes live in lifecycle.py."""

from __future__ import annotations

import uuid
from pathlib import Path

from django.conf import settings
from django.db import models

from trainer_core.spec import RunSpec


class State(models.TextChoices):
    DRAFT = "draft", "draft"
    QUEUED = "queued", "queued"
    STARTING = "starting", "starting"
    RUNNING = "running", "running"
    STOPPING = "stopping", "stopping"
    COMPLETED = "completed", "completed"
    FAILED = "failed", "failed"
    STOPPED = "stopped", "stopped"
    LOST = "lost", "lost"


LIVE = (State.QUEUED, State.STARTING, State.RUNNING, State.STOPPING)
"""States in which something runs, or is about to."""
ACTIVE = (State.STARTING, State.RUNNING, State.STOPPING)
"""States in which an attempt holds devices."""
ENDED = (State.COMPLETED, State.FAILED, State.STOPPED, State.LOST)
"""States from which a run may be resumed. LOST is left again when the supervisor is found alive."""


class Desired(models.TextChoices):
    """What a person wants; the supervisor polls it and acts."""

    RUN = "run", "run"
    STOP = "stop", "stop now"
    STOP_AND_SAVE = "stop_and_save", "stop and save"


IMPORTED = "imported"
"""Name of the event that says where a run that was trained elsewhere comes from. Its data holds the settings it had there."""


class Run(models.Model):
    """One training run. `spec` is a RunSpec as JSON; `summary` holds latest values for lists (reward, step, tok/s, ...)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="runs")
    parent = models.ForeignKey("self", null=True, on_delete=models.SET_NULL, related_name="children")
    forked_step = models.PositiveBigIntegerField(
        null=True, help_text="Step of the parent's checkpoint whose weights this run begins with."
    )
    spec = models.JSONField()
    tags = models.JSONField(default=list)
    state = models.CharField(max_length=10, choices=State.choices, default=State.DRAFT)
    desired = models.CharField(max_length=13, choices=Desired.choices, default=Desired.RUN)
    reason = models.TextField(blank=True, help_text="One sentence: why it is in this state, or what it waits for.")
    summary = models.JSONField(default=dict)
    archived = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    queued_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created_at",)
        indexes = [models.Index(fields=("state", "queued_at")), models.Index(fields=("archived", "-created_at"))]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"

    def run_spec(self) -> RunSpec:
        return RunSpec.model_validate(self.spec)

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def folder(self) -> Path:
        """The run's folder. Built from the id only, never from text a person typed."""
        return settings.RUNS_DIR / str(self.id)

    @property
    def imported(self) -> bool:
        """Whether it was trained elsewhere, so that there is nothing here to resume (one query)."""
        return self.events.filter(name=IMPORTED).exists()

    @property
    def starting_weights(self) -> Path:
        """The weights or adapter that a forked run begins with: its own copy, so that the parent may be deleted."""
        return self.folder / "start"

    @property
    def current_attempt(self) -> Attempt | None:
        return self.attempts.order_by("-number").first()


class Attempt(models.Model):
    """One start of a run: first launch, or a resume. Points of the newest attempt win.

    `supervisor_pid` and `supervisor_create_time` identify the process even if the pid is used again. `spool_offset` and
    `rollouts_offset` say how many bytes of the attempt's files are in the database: they move in the same transaction
    as the rows, so nothing is shipped twice or lost.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    host = models.ForeignKey("hosts.Host", null=True, on_delete=models.PROTECT, related_name="attempts")
    resumed_from = models.ForeignKey(
        "checkpoints.Checkpoint", null=True, on_delete=models.SET_NULL, related_name="resumed_attempts"
    )
    state = models.CharField(max_length=10, choices=State.choices, default=State.QUEUED)
    supervisor_pid = models.PositiveIntegerField(null=True)
    supervisor_create_time = models.FloatField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    server_restarts = models.PositiveIntegerField(default=0)
    exit_code = models.IntegerField(null=True, help_text="The trainer's; negative is a signal.")
    spool_offset = models.PositiveBigIntegerField(default=0)
    rollouts_offset = models.PositiveBigIntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("run", "number")
        constraints = [models.UniqueConstraint(fields=("run", "number"), name="attempt_numbers_are_unique")]

    def __str__(self) -> str:
        return f"{self.run.name} attempt {self.number}"

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts of its trainer, its own first; none before it was claimed."""
        return [] if self.host is None else [self.host.name, *(each.host.name for each in self.followers.all())]

    @property
    def folder(self) -> Path:
        return self.run.folder / "attempts" / str(self.number)


class Follower(models.Model):
    """A further host of an attempt's trainer, and the supervisor there. `rank` counts these hosts; the attempt's own is 0.

    It starts when the attempt is claimed and ends with it, or before it with the `reason` that ends the attempt.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="followers")
    host = models.ForeignKey("hosts.Host", on_delete=models.PROTECT, related_name="followers")
    rank = models.PositiveIntegerField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.STARTING)
    reason = models.TextField(blank=True)
    supervisor_pid = models.PositiveIntegerField(null=True)
    supervisor_create_time = models.FloatField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    exit_code = models.IntegerField(null=True, help_text="Of its share of the trainer; negative is a signal.")
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("attempt", "rank")
        constraints = [
            models.UniqueConstraint(fields=("attempt", "rank"), name="one_follower_per_rank"),
            models.UniqueConstraint(fields=("attempt", "host"), name="one_follower_per_host"),
        ]

    def __str__(self) -> str:
        return f"{self.attempt} on {self.host}"

    @property
    def folder(self) -> Path:
        """For what its supervisor keeps; its logs are beside those of the attempt, where the page finds them."""
        return self.attempt.folder / f"host-{self.rank}"

    def log(self, name: str) -> Path:
        """A log of this host, as supervisor-1.log."""
        return self.attempt.folder / f"{name}-{self.rank}.log"


class AttemptServer(models.Model):
    """One of the vLLM servers of an attempt, as its supervisor sees it. `number` counts from 0, as the names of their logs do.

    Its GPUs are the leases of the attempt; it listens on loopback of the attempt's host.
    """

    class State(models.TextChoices):
        STARTING = "starting", "starting"
        READY = "ready", "ready"
        FAILED = "failed", "failed"
        ENDED = "ended", "ended"

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="servers")
    number = models.PositiveSmallIntegerField()
    port = models.PositiveIntegerField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.STARTING)
    progress = models.CharField(max_length=100, blank=True, help_text="How far it is while it starts.")
    restarts = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ("attempt", "number")
        constraints = [
            models.UniqueConstraint(fields=("attempt", "number"), name="server_numbers_are_unique"),
        ]

    def __str__(self) -> str:
        return f"vLLM server {self.number} of {self.attempt}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_name(self) -> str:
        """In the folder of the attempt."""
        return server_log(self.number)


def server_log(number: int) -> str:
    """What the log of a holder's server is called."""
    return f"server-{number}.log"


class Event(models.Model):
    """Something that happened to a run: a state change, a checkpoint, a lost server, a reward error."""

    class Level(models.TextChoices):
        INFO = "info", "info"
        WARNING = "warning", "warning"
        ERROR = "error", "error"

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    attempt = models.ForeignKey(Attempt, null=True, on_delete=models.CASCADE, related_name="events")
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    created_at = models.DateTimeField()
    step = models.BigIntegerField(null=True)
    level = models.CharField(max_length=7, choices=Level.choices, default=Level.INFO)
    name = models.CharField(max_length=80)
    text = models.TextField()
    data = models.JSONField(default=dict)

    class Meta:
        ordering = ("id",)
        indexes = [models.Index(fields=("run", "id"))]
