"""Adding to the audit log, and finding in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Model, Q, QuerySet
from django.utils import timezone

from webapp.audit import origin
from webapp.audit.models import Entry


def record(
    actor: AbstractBaseUser | AnonymousUser | None,
    action: str,
    text: str,
    thing: Model | None = None,
    *,
    name: str = "",
) -> Entry:
    """Note that `actor` did something; None when nobody is signed in. `name` is that of `thing`, by default its `name`.

    Called in the transaction of the deed, so that there is never one without the other.
    """
    came_from = origin.current()
    return Entry.objects.create(
        actor_id=actor.pk if actor else None, actor_name=actor.get_username() if actor else "", action=action, text=text,
        target=(name or str(getattr(thing, "name", "")))[:200], target_id="" if thing is None else str(thing.pk),
        address=came_from.address[:45], via=came_from.token[:100],
    )  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """What to find. `since` and `until` are days, both included, in UTC."""

    actor: str = ""
    action: str = ""
    search: str = ""
    since: date | None = None
    until: date | None = None


def find(wanted: Filter) -> QuerySet[Entry]:
    """Matching entries, the newest first."""
    found = Entry.objects.all()
    if wanted.actor:
        found = found.filter(actor_name=wanted.actor)
    if wanted.action:
        found = found.filter(action=wanted.action)
    for word in wanted.search.split()[:10]:
        found = found.filter(
            Q(text__icontains=word) | Q(target__icontains=word) | Q(target_id__icontains=word) | Q(address=word)
        )
    if wanted.since:
        found = found.filter(at__gte=_midnight(wanted.since))
    if wanted.until:
        found = found.filter(at__lt=_midnight(wanted.until) + timedelta(days=1))
    return found


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), tzinfo=timezone.get_current_timezone())
