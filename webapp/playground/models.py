"""Servers that people start to talk to a run's model while the run itself has none."""

from __future__ import annotations

import uuid
from pathlib import Path

from django.conf import settings
from django.db import models
from django.db.models import Q

from webapp.runs.models import LIVE, State


class PlaygroundServer(models.Model):
    """One start of such a server: queued, starting, running, then stopped or failed. Each run has one at a time.

    It holds devices and a port as an attempt does, and has a supervisor of its own. `checkpoint` is set where its whole
    weights are served; otherwise it is the base model, and adapters of the run are loaded when they are asked for.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="playground_servers")
    checkpoint = models.ForeignKey("checkpoints.Checkpoint", null=True, on_delete=models.SET_NULL, related_name="+")
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    host = models.ForeignKey(
        "hosts.Host", on_delete=models.PROTECT, related_name="playground_servers",
        help_text="Where the studio's web server runs: a server listens for its own machine alone.",
    )  # fmt: skip
    state = models.CharField(max_length=10, choices=State.choices, default=State.QUEUED)
    stop = models.TextField(blank=True, help_text="Why somebody wants it to end; its supervisor polls this and acts.")
    reason = models.TextField(blank=True, help_text="One sentence: what it waits for, or why it ended.")
    log = models.JSONField(default=list, help_text="The last lines of its log, where it failed.")
    supervisor_pid = models.PositiveIntegerField(null=True)
    supervisor_create_time = models.FloatField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True, help_text="Somebody waited for it, or it answered.")

    class Meta:
        ordering = ("-created_at",)
        verbose_name = "playground server"
        constraints = [
            models.UniqueConstraint(
                fields=("run",), condition=Q(state__in=[state.value for state in LIVE]), name="one_playground_server_per_run"
            )
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"the playground of {self.run.name}"

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def answers(self) -> bool:
        return self.state == State.RUNNING

    @property
    def folder(self) -> Path:
        """Where its logs are."""
        return self.run.folder / "playground" / str(self.pk)
