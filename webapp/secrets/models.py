"""Values that runs get as environment variables and nobody can read again."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class Secret(models.Model):
    """One value, encrypted. A run may name the secrets of its owner, and those that are shared with everybody."""

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="secrets")
    name = models.CharField(max_length=80, help_text="The environment variable.")
    shared = models.BooleanField(default=False, help_text="For the runs of everybody; set by admins.")
    ciphertext = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("name", "owner")
        constraints = [models.UniqueConstraint(fields=("owner", "name"), name="secret_names_are_unique")]

    def __str__(self) -> str:
        return self.name
