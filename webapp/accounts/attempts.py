"""Failed sign-ins, counted for each name and address together, so that nobody can lock out somebody elsewhere.

They are in the database: several web processes must count together.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta

from django.db import transaction
from django.db.models import F
from django.http import HttpRequest
from django.utils import timezone

from webapp.accounts.models import FailedSignIn

ALLOWED = 5
"""Failed sign-ins of one name from one address before it has to wait."""
WINDOW_S = 300


def _key(request: HttpRequest, username: str) -> str:
    address = request.META.get("REMOTE_ADDR", "")
    return hashlib.sha256(f"{address}\n{username.lower()}".encode()).hexdigest()


def blocked(request: HttpRequest, username: str) -> bool:
    key = _key(request, username)
    return FailedSignIn.objects.filter(key=key, ends_at__gt=timezone.now(), count__gte=ALLOWED).exists()


def failed(request: HttpRequest, username: str) -> None:
    now = timezone.now()
    with transaction.atomic():
        FailedSignIn.objects.filter(ends_at__lte=now).delete()
        row, _ = FailedSignIn.objects.get_or_create(
            key=_key(request, username), defaults={"ends_at": now + timedelta(seconds=WINDOW_S)}
        )
        FailedSignIn.objects.filter(pk=row.pk).update(count=F("count") + 1)


def succeeded(request: HttpRequest, username: str) -> None:
    FailedSignIn.objects.filter(key=_key(request, username)).delete()
