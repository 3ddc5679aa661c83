"""Checkpoints of a run: rows beside the folders that the trainer wrote."""

from __future__ import annotations

from pathlib import Path

from django.db import models


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
    created_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-step", "-id")
        constraints = [models.UniqueConstraint(fields=("run", "attempt", "step"), name="one_checkpoint_per_step")]

    def __str__(self) -> str:
        return f"{self.run.name} step {self.step}"

    @property
    def folder(self) -> Path:
        return self.run.folder / "checkpoints" / f"checkpoint-{self.step}"
