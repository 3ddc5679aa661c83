"""Where the current request comes from, for entries that are written far from it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace

from django.http import HttpRequest, HttpResponse


@dataclass(frozen=True)
class Origin:
    """Network address, and the name of the API token if there is one."""

    address: str = ""
    token: str = ""


_NOWHERE = Origin()
_ORIGIN: ContextVar[Origin] = ContextVar("origin", default=_NOWHERE)


def current() -> Origin:
    """Of the request that is being answered; empty in workers and commands."""
    return _ORIGIN.get()


def through_token(name: str) -> None:
    """Note that the current request was let in by this API token."""
    _ORIGIN.set(replace(_ORIGIN.get(), token=name))


class KeepOrigin:
    """Middleware: remembers the address of a request while it is answered."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        before = _ORIGIN.get()
        _ORIGIN.set(Origin(request.META.get("REMOTE_ADDR", "") or ""))
        try:
            return self.get_response(request)
        finally:
            _ORIGIN.set(before)
