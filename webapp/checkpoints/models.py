"""Checkpoints of a run: rows beside the folders that the trainer wrote."""

from __future__ import annotations

from pathlib import Path

from django.db import models

EVALUATED = ("eval/reward", "eval/pass@1", "eval/pass@k")
"""Metrics of an evaluation that are kept with a checkpoint."""


class Checkpoint(models.Model):
    """A folder `checkpoints/checkpoint-<step>` of a run. `deleted_at` is set once the folder is gone."""

    class Kind(models.TextChoices):
        ADAPTER = "adapter", "LoRA adapter"
        FULL = "full", "full weights"

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="checkpoints")
    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="checkpoints")
    step = models.PositiveBigIntegerField()
    kind = models.CharField(max_length=7, choices=Kind.choices)
    size_bytes = models.PositiveBigIntegerField(default=0)
    reward = models.FloatField(null=True)
    evaluation = models.JSONField(default=dict, help_text="What was measured at this step, by metric; empty: nothing.")
    best = models.BooleanField(default=False, help_text="The best evaluation of the run that has a checkpoint.")
    created_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-step", "-id")
        constraints = [models.UniqueConstraint(fields=("run", "attempt", "step"), name="one_checkpoint_per_step")]

    def __str__(self) -> str:
        return f"{self.run.name} step {self.step}"

    @property
    def eval_reward(self) -> float | None:
        return self.evaluation.get("eval/reward")

    @property
    def measured(self) -> list[tuple[str, float]]:
        """What was measured at this step, with names as people say them: reward, pass@1."""
        known = ((name, self.evaluation.get(name)) for name in EVALUATED)
        return [(name.removeprefix("eval/"), value) for name, value in known if value is not None]

    @property
    def folder(self) -> Path:
        return self.run.folder / "checkpoints" / f"checkpoint-{self.step}"


class Export(models.Model):
    """Something made of a checkpoint: its adapter merged into the base model, or a push to the hub.

    Queued here and done by a worker of the host that has the files, in a process of its own.
    """

    class Kind(models.TextChoices):
        MERGE = "merge", "merged weights"
        PUSH = "push", "push to the hub"

    class State(models.TextChoices):
        QUEUED = "queued", "queued"
        RUNNING = "running", "running"
        DONE = "done", "done"
        FAILED = "failed", "failed"

    checkpoint = models.ForeignKey(Checkpoint, on_delete=models.CASCADE, related_name="exports")
    kind = models.CharField(max_length=5, choices=Kind.choices)
    state = models.CharField(max_length=7, choices=State.choices, default=State.QUEUED)
    owner = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="+")
    text = models.TextField(blank=True, help_text="How far it is, or why it failed, in one sentence.")
    share = models.FloatField(default=0.0, help_text="How much of it is done, 0 to 1.")
    size_bytes = models.PositiveBigIntegerField(default=0)
    repo = models.CharField(max_length=200, blank=True)
    private = models.BooleanField(default=True)
    merged = models.BooleanField(default=False, help_text="Push the merged weights rather than the checkpoint's own.")
    url = models.CharField(max_length=500, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    heartbeat_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.get_kind_display()} of {self.checkpoint}"

    @property
    def folder(self) -> Path:
        """Where merged weights are."""
        return self.checkpoint.run.folder / "merged" / str(self.pk)

    @property
    def open(self) -> bool:
        return self.state in (self.State.QUEUED, self.State.RUNNING)
