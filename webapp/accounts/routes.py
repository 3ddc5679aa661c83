"""Which action each page and each part of the API asks for. A route that is not here is refused: add it.

What belongs to somebody is looked at once more by its view, with permissions.require and the thing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from django.http import HttpRequest, HttpResponse, HttpResponseBase

from webapp.accounts.permissions import Action, Denied, require

SAFE = ("GET", "HEAD", "OPTIONS")


class Rule(NamedTuple):
    """Actions that reading (GET, HEAD) and everything else ask for."""

    read: Action
    write: Action


EVERYBODY = Rule(Action.ANYONE, Action.ANYONE)
SIGNED_IN = Rule(Action.LOOK, Action.LOOK)
RUNS = Rule(Action.LOOK, Action.RUN)
RUNNERS_ONLY = Rule(Action.RUN, Action.RUN)
REWARDS = Rule(Action.LOOK, Action.REWARD)
AUTHORS_ONLY = Rule(Action.REWARD, Action.REWARD)
HOSTS = Rule(Action.LOOK, Action.ADMIN)
ADMINS_ONLY = Rule(Action.ADMIN, Action.ADMIN)

PAGES: dict[str, Rule] = {
    "home": SIGNED_IN, "confirm": SIGNED_IN, "login": EVERYBODY, "logout": EVERYBODY,
    "accounts:*": SIGNED_IN, "accounts:people": ADMINS_ONLY, "accounts:change_person": ADMINS_ONLY,
    "runs:*": RUNS, "runs:new": RUNNERS_ONLY, "runs:edit": RUNNERS_ONLY,
    "runs:bulk": SIGNED_IN,  # comparing changes nothing; for the rest its view asks run by run
    "secrets:*": RUNS, "secrets:list": RUNNERS_ONLY,
    "sharing:*": RUNS, "shared:*": EVERYBODY,
    "reports:*": RUNS, "reports:new": RUNNERS_ONLY, "reports:edit": RUNNERS_ONLY,
    "sweeps:*": RUNS, "sweeps:new": RUNNERS_ONLY,
    "rollouts:*": RUNS, "playground:*": RUNS,
    "checkpoints:*": RUNS,
    "rewards:*": REWARDS, "rewards:new": AUTHORS_ONLY, "rewards:edit": AUTHORS_ONLY,
    "hosts:*": HOSTS,
    "metrics:*": HOSTS,
    "webhooks:*": ADMINS_ONLY,
    "audit:*": ADMINS_ONLY,
    "api:openapi-view": SIGNED_IN,
}  # fmt: skip
"""By name of the route; `app:*` stands for all others of an app. The rest of the API has its own table."""

API: dict[str, Rule] = {
    "health": EVERYBODY, "openapi.json": EVERYBODY, "me": SIGNED_IN, "hosts": HOSTS,
    "runs": RUNS, "sweeps": RUNS, "imports": RUNS, "spec": RUNS, "checkpoints": RUNS, "rewards": REWARDS,
    "reports": RUNS, "audit": ADMINS_ONLY,
}  # fmt: skip
"""By the first word after /api/."""


def page_rule(view_name: str) -> Rule | None:
    """The rule of a page; None when nobody has decided."""
    app, colon, _ = view_name.rpartition(":")
    return PAGES.get(view_name) or (PAGES.get(f"{app}:*") if colon else None)


def api_rule(route: str) -> Rule | None:
    """The rule of an operation, by its route ("api/runs/<uuid:run_id>/stop"); None when nobody has decided."""
    return API.get(route.removeprefix("api/").partition("/")[0])


def demand(request: HttpRequest, rule: Rule | None) -> None:
    """Raises Denied with a sentence unless the rule lets this request in."""
    if rule is None:
        raise Denied(f"Nobody has decided who may use {request.path}; webapp/accounts/routes.py must name it.")
    require(request.user, rule.read if request.method in SAFE else rule.write)


class RoutePermissions:
    """Middleware: no page is answered without a decision. The API decides after it has looked at the token (api/auth.py)."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_view(self, request: HttpRequest, *_: object) -> HttpResponseBase | None:
        match = request.resolver_match
        name = match.view_name if match else ""
        if name and name.startswith("api:") and name not in PAGES:
            return None
        if match and match.route.startswith("api/") and not name:
            return None  # the API's "no such address"
        demand(request, page_rule(name or ""))
        return None
