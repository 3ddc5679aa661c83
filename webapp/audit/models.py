"""Who did what, and when. Entries are added and read, never changed."""

from __future__ import annotations

from typing import Any, NoReturn

from django.conf import settings
from django.db import models
from django.utils import timezone


class AppendOnly(TypeError):
    """Somebody tried to change or delete an entry of the audit log."""

    def __init__(self) -> None:
        super().__init__("entries of the audit log are added and read, never changed or deleted")


class EntryQuerySet(models.QuerySet["Entry"]):
    def update(self, **kwargs: Any) -> NoReturn:
        raise AppendOnly

    def delete(self) -> NoReturn:
        raise AppendOnly


class Entry(models.Model):
    """One deed. Names are kept as text, so that the entry still says who and what when the account or run is gone."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    actor_name = models.CharField(max_length=150, blank=True, help_text="Empty: nobody was signed in.")
    action = models.CharField(max_length=60, db_index=True, help_text="Kind of thing and deed, such as run.deleted.")
    target = models.CharField(max_length=200, blank=True, help_text="Name of the thing.")
    target_id = models.CharField(max_length=64, blank=True)
    text = models.TextField(help_text="One sentence.")
    address = models.CharField(max_length=45, blank=True, help_text="Where the request came from.")
    via = models.CharField(max_length=100, blank=True, help_text="Name of the API token; empty for a browser.")

    objects = EntryQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.actor_name or 'nobody'}: {self.action} {self.target}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Store a new entry. Raises AppendOnly for one that is stored."""
        if not self._state.adding:
            raise AppendOnly
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnly
