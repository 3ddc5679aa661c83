"""Addresses that are told when a run ends or raises an alert."""

from __future__ import annotations

import secrets

from django.conf import settings
from django.db import models


def new_secret() -> str:
    return secrets.token_hex(24)


class Webhook(models.Model):
    """One address. Events with an id up to `cursor` are told; a failed attempt waits until `next_try_at`."""

    name = models.CharField(max_length=80)
    url = models.CharField(max_length=500)
    secret = models.CharField(max_length=64, default=new_secret, help_text="Signs each message.")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    cursor = models.BigIntegerField(default=0)
    failures = models.PositiveIntegerField(default=0, help_text="In a row.")
    next_try_at = models.DateTimeField(null=True)
    last_error = models.TextField(blank=True)
    last_sent_at = models.DateTimeField(null=True)
    active = models.BooleanField(default=True)

    class Meta:
        ordering = ("name", "id")

    def __str__(self) -> str:
        return self.name
