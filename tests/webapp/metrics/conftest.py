"""A run with an attempt, and spool text as the trainer writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_core.spec import RunSpec
from trainer_core.spool import Spool
from webapp.accounts.models import User
from webapp.metrics.store import ship_spool
from webapp.runs.models import Attempt, Run


@pytest.fixture
def owner(db: None) -> User:
    return User.objects.create_user("alice", password="correct horse battery")


@pytest.fixture
def run(owner: User) -> Run:
    return Run.objects.create(name="a run", owner=owner, spec=RunSpec().model_dump(mode="json"))


@pytest.fixture
def attempt(run: Run) -> Attempt:
    return Attempt.objects.create(run=run, number=1)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """The trainer's own writer, so that the format is tested on both sides."""
    return Spool(tmp_path / "spool.jsonl")


@pytest.fixture
def ship(tmp_path: Path, attempt: Attempt) -> Callable[..., Any]:
    """Ships what the spool file holds beyond the stored offset."""

    def ship_rest(to: Attempt = attempt, path: Path = tmp_path / "spool.jsonl") -> int:
        return ship_spool(to, to.spool_offset, path.read_bytes()[to.spool_offset :])

    return ship_rest
