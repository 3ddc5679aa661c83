"""Two people with tokens, and clients that send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from trainer_core.spec import RunSpec
from webapp.accounts.models import ApiToken, User
from webapp.runs.models import Attempt, Run, State


@pytest.fixture
def alice(db: None) -> User:
    return User.objects.create_user("alice", password="correct horse battery")


@pytest.fixture
def bob(db: None) -> User:
    return User.objects.create_user("bob", password="staple staple staple")


def client_of(user: User) -> Client:
    _, text = ApiToken.create(user, "test")
    return Client(headers={"Authorization": f"Bearer {text}"}, enforce_csrf_checks=True)


@pytest.fixture
def api(alice: User) -> Client:
    return client_of(alice)


@pytest.fixture
def bobs_api(bob: User) -> Client:
    return client_of(bob)


@pytest.fixture
def make_run(alice: User) -> Callable[..., Run]:
    def make(state: str = State.DRAFT, owner: User = alice, **fields: Any) -> Run:
        spec = RunSpec(name=fields.pop("name", "a run"), tags=fields.get("tags", []))
        return Run.objects.create(name=spec.name, owner=owner, spec=spec.model_dump(mode="json"), state=state, **fields)

    return make


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()


@pytest.fixture
def attempt(run: Run) -> Attempt:
    return Attempt.objects.create(run=run, number=1)
