"""Who may do what: the one place that decides. Which route asks for which action is in routes.py.

Four roles. A viewer sees everything and changes nothing. A runner makes runs, sweeps and reports and steers their own. An
author of rewards writes reward functions, which is code that the studio executes. An admin does all of it to everybody's,
and looks after people, hosts, webhooks and the audit log. Runner and author may be one person.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Protocol

from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.models import User


class Action(StrEnum):
    """What is asked for. With a thing: to do it to that one."""

    ANYONE = "anyone"
    """Needs no account: sign-in, health, a share link."""
    LOOK = "look"
    """See pages, download, change one's own account."""
    RUN = "run"
    """Make runs, sweeps and reports; steer, share and delete them."""
    REWARD = "reward"
    """Write and try reward functions."""
    ADMIN = "admin"
    """Change what belongs to the studio as a whole."""


class Owned(Protocol):
    """A model's row that belongs to somebody."""

    _meta: ClassVar[Any]

    @property
    def owner(self) -> User: ...
    @property
    def owner_id(self) -> int: ...


class Denied(PermissionDenied):
    """The text is a sentence that says why, for a page or an answer of the API."""


def user_of(request: HttpRequest) -> User:
    """The account that is asking; where nobody may come without one, so that there always is one."""
    assert isinstance(request.user, User)
    return request.user


def can(user: User | AnonymousUser, action: Action, thing: Owned | None = None) -> bool:
    """Whether `user` may do this; with a `thing`, to that one. Without one: to things of their own."""
    if action is Action.ANYONE:
        return True
    if not (isinstance(user, User) and user.is_active):
        return False
    if action is Action.LOOK:
        return True
    if user.looks_only:
        return False
    if user.is_superuser:
        return True
    allowed = {Action.RUN: user.is_runner, Action.REWARD: user.is_author, Action.ADMIN: False}[action]
    return allowed and (thing is None or thing.owner_id == user.pk)


def require(user: User | AnonymousUser, action: Action, thing: Owned | None = None) -> None:
    """Raises Denied, with a sentence, unless `can` says yes."""
    if not can(user, action, thing):
        raise Denied(_why_not(user, action, thing))


def _why_not(user: User | AnonymousUser, action: Action, thing: Owned | None) -> str:
    if not isinstance(user, User):
        return "Sign in first."
    if user.looks_only:
        return "This API token may only read; make one on the account page that may do what you may."
    if thing is not None and can(user, action):
        what = thing._meta.verbose_name
        return f"The {what} belongs to {thing.owner.username}; only its owner or an admin may change it."
    wanted = {
        Action.RUN: "make or steer runs; an admin can make it a runner",
        Action.REWARD: "write or try reward functions; an admin can make it an author of rewards",
    }.get(action, "do this; it is for admins")
    return f"Your account ({user.role.label}) may not {wanted}."
