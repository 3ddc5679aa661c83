"""Making, changing and removing runs. What is checked before one starts is in checks.py, state changes in lifecycle.py."""

from __future__ import annotations

import shutil
from typing import Any

from django.db import transaction
from django.db.models import Q

from trainer_core.rewards import BUILTINS
from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.accounts.permissions import Action, can
from webapp.audit import log
from webapp.checkpoints.models import Checkpoint
from webapp.hosts.models import Lease, PortLease
from webapp.rewards.models import RewardFunction
from webapp.runs import forking
from webapp.runs.checks import check_spec, local_model
from webapp.runs.lifecycle import Refused, record
from webapp.runs.models import LIVE, Run, State
from webapp.runs.problems import Problem

__all__ = [
    "Problem", "as_json", "check_spec", "create_run", "delete_run", "local_model", "may_change", "pin_rewards",
    "set_archived", "update_draft",
]  # fmt: skip


def create_run(spec: RunSpec, owner: User, *, parent: Run | None = None, checkpoint: Checkpoint | None = None) -> Run:
    """Store a draft. Studio rewards without a version get the newest one, so that the run never changes meaning.

    With `checkpoint`, one of the parent's, it is a fork: it begins at step 0 with a copy of those weights. Raises Refused
    when forking.problems has something to say.
    """
    pinned = pin_rewards(spec)
    if checkpoint is not None:
        parent = checkpoint.run
        if problems := forking.problems(spec, checkpoint):
            raise Refused(problems[0].message)
    with transaction.atomic():
        run = Run.objects.create(
            name=pinned.name, owner=owner, parent=parent, spec=pinned.model_dump(mode="json"), tags=pinned.tags,
            forked_step=None if checkpoint is None else checkpoint.step,
        )  # fmt: skip
        origin = f", cloned from {parent.name}" if parent else ""
        if checkpoint is not None:
            origin = f", forked from step {checkpoint.step} of {checkpoint.run.name}"
            forking.copy_weights(checkpoint, run)
        record(run, "created", f"Created by {owner.username}{origin}.", actor=owner)
    return run


def update_draft(run: Run, spec: RunSpec, actor: User) -> bool:
    """Replace the spec of a draft. False, and nothing changed, when it is no draft any more."""
    pinned = pin_rewards(spec)
    with transaction.atomic():
        changed = Run.objects.filter(pk=run.pk, state=State.DRAFT).update(
            name=pinned.name, spec=pinned.model_dump(mode="json"), tags=pinned.tags
        )
        if changed:
            record(run, "edited", f"Settings changed by {actor.username}.", actor=actor)
    return bool(changed)


def may_change(user: User, run: Run) -> bool:
    """Whether this account may steer and delete the run: a runner who owns it, or an admin."""
    return can(user, Action.RUN, run)


def set_archived(run: Run, actor: User, archived: bool) -> None:
    """Take a run out of the list, or put it back. Raises Refused while it is live."""
    with transaction.atomic():
        changed = Run.objects.filter(pk=run.pk).exclude(state__in=LIVE).update(archived=archived)
        if not changed:
            raise Refused("The run is live; stop it before you archive it.")
        record(run, "archived" if archived else "unarchived", f"By {actor.username}.", actor=actor)
    run.refresh_from_db()


def delete_run(run: Run, actor: User) -> None:
    """Delete a run with everything it wrote. Raises Refused while it is live, or while devices are still held for it."""
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        if locked.is_live or Lease.objects.filter(attempt__run=locked).exists():
            raise Refused("The run is live or still holds devices; stop it first.")
        held = Lease.objects.filter(playground__run=locked).exists()
        if held or locked.playground_servers.filter(state__in=LIVE).exists():
            raise Refused("The run's playground has a server; stop that first, on the run's page Playground.")
        folder = locked.folder
        log.record(actor, "run.deleted", f"Deleted by {actor.username}, with checkpoints, curves and logs.", locked)
        PortLease.objects.filter(Q(attempt__run=locked) | Q(playground__run=locked)).delete()
        locked.delete()
        transaction.on_commit(lambda: shutil.rmtree(folder, ignore_errors=True))


def pin_rewards(spec: RunSpec) -> RunSpec:
    """The spec with the newest version filled in for studio rewards that name none."""
    rewards = []
    for reward in spec.rewards:
        if reward.version is None and reward.name not in BUILTINS:
            newest = RewardFunction.objects.filter(name=reward.name).values_list("versions__number", flat=True)
            number = max((number for number in newest if number is not None), default=None)
            reward = reward.model_copy(update={"version": number})
        rewards.append(reward)
    return spec.model_copy(update={"rewards": rewards})


def as_json(problems: list[Problem]) -> list[dict[str, Any]]:
    return [{"field": problem.field, "message": problem.message} for problem in problems]
