"""Stored rollouts: what the model said, and what it earned."""

from __future__ import annotations

from django.db import models


class StoredRollout(models.Model):
    """One rollout line of the spool. `step` is the weight version that began it; `data` is the line's `rollout`."""

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="rollouts")
    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="rollouts")
    step = models.BigIntegerField()
    group_id = models.CharField(max_length=64)
    row_index = models.BigIntegerField()
    reward = models.FloatField(null=True, help_text="Empty when the rollout could not be scored.")
    created_at = models.DateTimeField()
    data = models.JSONField()

    class Meta:
        ordering = ("id",)
        indexes = [models.Index(fields=("run", "step")), models.Index(fields=("run", "group_id"))]
