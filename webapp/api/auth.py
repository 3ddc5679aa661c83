"""Who is asking: a bearer token, or a browser's session with its CSRF token."""

from __future__ import annotations

from uuid import UUID

from django.http import Http404, HttpRequest
from ninja.security import HttpBearer, SessionAuth

from webapp.accounts.models import ApiToken, User
from webapp.accounts.permissions import Action, require, user_of
from webapp.accounts.routes import api_rule, demand
from webapp.audit import origin
from webapp.runs.models import Run


class Token(HttpBearer):
    """`Authorization: Bearer ob_...`; tokens are made on the account page."""

    def authenticate(self, request: HttpRequest, token: str) -> User | None:
        found = ApiToken.authenticate(token)
        if found is None:
            return None
        request.user = found.user
        found.user.looks_only = found.reads_only
        origin.through_token(found.name)
        _demand(request)
        return found.user


class Session(SessionAuth):
    """A browser that is signed in."""

    def authenticate(self, request: HttpRequest, key: str | None) -> User | None:
        user = super().authenticate(request, key)
        if user is not None:
            _demand(request)
        return user


def _demand(request: HttpRequest) -> None:
    """Raises Denied unless accounts/routes.py lets this account use this operation."""
    assert request.resolver_match is not None
    demand(request, api_rule(request.resolver_match.route))


AUTH = [Token(), Session()]
"""A token is looked at first, so that a request which carries one needs no CSRF token."""


def get_run(run_id: UUID) -> Run:
    """Raises Http404 with a sentence."""
    run = Run.objects.select_related("owner", "parent").filter(pk=run_id).first()
    if run is None:
        raise Http404(f"There is no run {run_id}.")
    return run


def get_own_run(request: HttpRequest, run_id: UUID) -> Run:
    """A run that the account may change. Raises Http404, or Denied with a sentence."""
    run = get_run(run_id)
    require(user_of(request), Action.RUN, run)
    return run
