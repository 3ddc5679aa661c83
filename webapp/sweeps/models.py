"""Sweeps and their trials: which run has which place."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models


class Sweep(models.Model):
    """Runs made together from one run's settings. `axes` is what was asked for, as the API takes it."""

    class Method(models.TextChoices):
        GRID = "grid", "every combination"
        RANDOM = "random", "a random choice"

    class Goal(models.TextChoices):
        MAX = "max", "the larger the better"
        MIN = "min", "the smaller the better"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=120)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="sweeps")
    base = models.ForeignKey("runs.Run", null=True, on_delete=models.SET_NULL, related_name="sweeps")
    method = models.CharField(max_length=6, choices=Method.choices)
    axes = models.JSONField()
    seed = models.PositiveBigIntegerField(default=0)
    metric = models.CharField(max_length=250, default="reward", help_text="What the runs are compared by.")
    goal = models.CharField(max_length=3, choices=Goal.choices, default=Goal.MAX)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return self.name


class Trial(models.Model):
    """One run of a sweep, and the values that it has there, by the path of the setting."""

    sweep = models.ForeignKey(Sweep, on_delete=models.CASCADE, related_name="trials")
    run = models.OneToOneField("runs.Run", on_delete=models.CASCADE, related_name="trial")
    number = models.PositiveIntegerField()
    place = models.JSONField()

    class Meta:
        ordering = ("number",)
        constraints = [models.UniqueConstraint(fields=("sweep", "number"), name="trial_numbers_are_unique")]

    def __str__(self) -> str:
        return f"{self.sweep.name} {self.number}"
