"""Reward functions written in the studio. Versions never change; a run names the version it uses."""

from __future__ import annotations

import hashlib

from django.conf import settings
from django.db import models


class RewardFunction(models.Model):
    name = models.CharField(max_length=80, unique=True, help_text="Also the name of the Python function.")
    description = models.TextField(blank=True)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="reward_functions")
    archived = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name

    @property
    def latest(self) -> RewardVersion | None:
        return self.versions.order_by("-number").first()


class RewardVersion(models.Model):
    function = models.ForeignKey(RewardFunction, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    source = models.TextField()
    sha256 = models.CharField(max_length=64)
    note = models.CharField(max_length=200, blank=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-number",)
        constraints = [models.UniqueConstraint(fields=("function", "number"), name="reward_versions_are_unique")]

    def __str__(self) -> str:
        return f"{self.function.name} v{self.number}"

    def save(self, *args: object, **kwargs: object) -> None:
        """Store a new version. Raises ValueError for an existing one: versions are immutable."""
        if not self._state.adding:
            raise ValueError(f"{self} is stored and can't be changed; save a new version")
        self.sha256 = hashlib.sha256(self.source.encode()).hexdigest()
        super().save(*args, **kwargs)  # type: ignore[arg-type]
