"""Who is asking: a bearer token, or a browser's session with its CSRF token."""

from __future__ import annotations

from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest
from ninja.security import HttpBearer, SessionAuth

from webapp.accounts.models import ApiToken, User
from webapp.runs.models import Run
from webapp.runs.services import may_change


class Token(HttpBearer):
    """`Authorization: Bearer ob_...`; tokens are made on the account page."""

    def authenticate(self, request: HttpRequest, token: str) -> User | None:
        found = ApiToken.authenticate(token)
        if found is None:
            return None
        request.user = found.user
        return found.user


AUTH = [Token(), SessionAuth()]
"""A token is looked at first, so that a request which carries one needs no CSRF token."""


def user_of(request: HttpRequest) -> User:
    """The account that is asking."""
    assert isinstance(request.user, User)  # AUTH has let it in
    return request.user


def get_run(run_id: UUID) -> Run:
    """Raises Http404 with a sentence."""
    run = Run.objects.select_related("owner", "parent").filter(pk=run_id).first()
    if run is None:
        raise Http404(f"There is no run {run_id}.")
    return run


def get_own_run(request: HttpRequest, run_id: UUID) -> Run:
    """A run that the account may change. Raises Http404, or PermissionDenied with a sentence."""
    run = get_run(run_id)
    if not may_change(user_of(request), run):
        raise PermissionDenied(f"The run belongs to {run.owner.username}; only its owner or an admin may change it.")
    return run
