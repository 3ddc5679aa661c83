"""Failed sign-ins, counted for each name and address together, so that nobody can lock out somebody elsewhere."""

from __future__ import annotations

import hashlib

from django.core.cache import cache
from django.http import HttpRequest

ALLOWED = 5
"""Failed sign-ins of one name from one address before it has to wait."""
WINDOW_S = 300


def _key(request: HttpRequest, username: str) -> str:
    address = request.META.get("REMOTE_ADDR", "")
    return "failed-logins:" + hashlib.sha256(f"{address}\n{username.lower()}".encode()).hexdigest()


def blocked(request: HttpRequest, username: str) -> bool:
    return cache.get(_key(request, username), 0) >= ALLOWED


def failed(request: HttpRequest, username: str) -> None:
    key = _key(request, username)
    if not cache.add(key, 1, WINDOW_S):
        cache.incr(key)


def succeeded(request: HttpRequest, username: str) -> None:
    cache.delete(_key(request, username))
