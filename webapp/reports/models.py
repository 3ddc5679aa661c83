"""Texts about runs, with their charts in them."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models


class Report(models.Model):
    """Markdown; blocks marked `chart` become live charts (rendering.py)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    title = models.CharField(max_length=160)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="reports")
    text = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("-changed_at",)

    def __str__(self) -> str:
        return self.title

    @property
    def name(self) -> str:
        """How lists and the audit log call it."""
        return self.title
