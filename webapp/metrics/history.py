"""Runs that were trained elsewhere: people bring their history, and it is stored, drawn and exported like any other."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from trainer_core.spec import ModelSpec, RunSpec
from webapp.accounts.models import User
from webapp.metrics.store import WrongOffset, ship_spool
from webapp.runs.lifecycle import Refused, record
from webapp.runs.models import IMPORTED, Attempt, Run, State

MAX_BODY = 2 * 2**20
_MODEL_KEYS = ("model_name_or_path", "model_name", "_name_or_path", "model", "base_model")


def create(
    owner: User, *, name: str, source: str, config: dict[str, Any], tags: list[str], started_at: datetime | None,
    ended_at: datetime | None, failed: bool,
) -> Run:  # fmt: skip
    """An ended run without points. Raises pydantic.ValidationError on a name or tags that no run may have."""
    model = next((config[key] for key in _MODEL_KEYS if isinstance(config.get(key), str) and config[key]), "unknown")
    spec = RunSpec(name=name, tags=tags, notes=f"Imported from {source}.", model=ModelSpec(path=model))
    state = State.FAILED if failed else State.COMPLETED
    started, ended = started_at or timezone.now(), ended_at or timezone.now()
    with transaction.atomic():
        run = Run.objects.create(
            name=spec.name, owner=owner, spec=spec.model_dump(mode="json"), tags=spec.tags, state=state,
            reason=f"Imported from {source}.", queued_at=started, started_at=started, ended_at=ended,
        )  # fmt: skip
        attempt = Attempt.objects.create(run=run, number=1, state=state, started_at=started, ended_at=ended)
        record(
            run, IMPORTED, f"Imported from {source} by {owner.username}.", attempt=attempt, actor=owner, config=config
        )
    return run


def add(run: Run, offset: int, lines: bytes) -> int:
    """Store spool lines of an imported run that begin at byte `offset` of all that is sent; returns where to go on.

    A batch that is stored already changes nothing. Raises Refused for other runs, and when a batch is missing before this one.
    """
    attempt = run.current_attempt
    imported = run.events.filter(name=IMPORTED).values_list("attempt_id", flat=True).first()
    if attempt is None or attempt.pk != imported:
        raise Refused("The run reports through its supervisor; only runs made by an import take points from outside.")
    try:
        return ship_spool(attempt, offset, lines)
    except WrongOffset as error:
        if offset + len(lines) <= error.expected:
            return error.expected
        raise Refused(str(error)) from error
