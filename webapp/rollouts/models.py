"""Stored rollouts: what the model said, and what it earned."""

from __future__ import annotations

from django.db import models


class StoredRollout(models.Model):
    """One rollout line of the spool. `step` is the weight version that began it; `data` is the line's `rollout`.

    `trained_step` and `staleness` are known once the rollout's group was trained on. `text` is what a search looks in:
    everything that was said, casefolded.
    """

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="rollouts")
    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="rollouts")
    step = models.BigIntegerField()
    group_id = models.CharField(max_length=64)
    row_index = models.BigIntegerField()
    reward = models.FloatField(null=True, help_text="Empty when the rollout could not be scored.")
    created_at = models.DateTimeField()
    data = models.JSONField()
    rollout_id = models.CharField(max_length=64, default="")
    trained_step = models.BigIntegerField(null=True)
    staleness = models.BigIntegerField(null=True, help_text="Weight updates between its beginning and its training.")
    text = models.TextField(default="")

    class Meta:
        ordering = ("id",)
        indexes = [
            models.Index(fields=("run", "step")),
            models.Index(fields=("run", "group_id")),
            models.Index(fields=("run", "row_index")),
        ]


class RolloutTokens(models.Model):
    """Single tokens of one sequence of a rollout, as trainer_core/token_log.py wrote them; most rollouts have none."""

    rollout = models.ForeignKey(StoredRollout, on_delete=models.CASCADE, related_name="tokens")
    sequence = models.PositiveIntegerField()
    data = models.JSONField()

    class Meta:
        ordering = ("rollout", "sequence")
        constraints = [models.UniqueConstraint(fields=("rollout", "sequence"), name="one_row_per_sequence")]
