"""How a run changes state. Every change is a compare-and-swap, writes an event, and notifies on commit.

People call launch, stop and resume (through pages and API); the workers call the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.utils import timezone

from webapp.accounts.models import User
from webapp.audit import log
from webapp.celery import app
from webapp.checkpoints.models import Checkpoint
from webapp.runs.models import ENDED, Attempt, Desired, Event, Run, State
from webapp.secrets.services import Missing, redactor_of, values_of


class Refused(Exception):
    """An action that the run's state does not allow; the text is a sentence for the person who asked."""


def record(
    run: Run, name: str, text: str, *, attempt: Attempt | None = None, actor: User | None = None,
    level: str = Event.Level.INFO, step: int | None = None, **data: Any,
) -> Event:  # fmt: skip
    """Write an event of this moment; what a person did goes into the audit log too."""
    if actor is not None:
        log.record(actor, f"run.{name.removeprefix('state:')}", text, run)
    redactor = redactor_of(run)
    if redactor:
        text, data = redactor.text(text), redactor.json(data)
    return Event.objects.create(
        run=run, attempt=attempt, actor=actor, created_at=timezone.now(), level=level, name=name, text=text, step=step,
        data=data,
    )  # fmt: skip


def change_state(
    run: Run, old: Iterable[State], new: State, reason: str, *, attempt: Attempt | None = None, actor: User | None = None,
    level: str = Event.Level.INFO, **fields: Any,
) -> bool:  # fmt: skip
    """Move the run (and its attempt) from one of `old` to `new`, or do nothing and return False.

    `fields` are further columns of the run to set in the same update.
    """
    with transaction.atomic():
        now, reason = timezone.now(), redactor_of(run).text(reason)
        changes = {"state": new, "reason": reason, **fields}
        if new in ENDED:
            changes["ended_at"] = now
        if not Run.objects.filter(pk=run.pk, state__in=list(old)).update(**changes):
            return False
        if attempt is not None:
            ended = {"ended_at": now} if new in ENDED else {}
            Attempt.objects.filter(pk=attempt.pk).update(state=new, **ended)
        record(run, f"state:{new}", reason, attempt=attempt, actor=actor, level=level)
    run.refresh_from_db()
    return True


def launch(run: Run, actor: User | None) -> Attempt:
    """Queue a draft. Raises Refused when it is not a draft."""
    return _enqueue(run, (State.DRAFT,), actor, resumed_from=None, verb="launched")


def can_resume(run: Run) -> bool:
    """Whether `resume` would queue the run."""
    return run.state in ENDED and not run.imported


def resume(run: Run, actor: User | None, checkpoint: Checkpoint | None = None) -> Attempt:
    """Queue a new attempt of an ended run, from `checkpoint` or its newest one, or from the start if it has none.

    Raises Refused when the run is live or was trained elsewhere, or when the checkpoint is not one of its own.
    """
    if run.imported:
        raise Refused("The run was trained elsewhere, so there is nothing to go on from; clone it to train here.")
    if checkpoint is None:
        checkpoint = run.checkpoints.filter(deleted_at=None).order_by("-attempt__number", "-step").first()
    elif checkpoint.run_id != run.pk or checkpoint.deleted_at:
        raise Refused("This checkpoint does not exist any more; choose another one of this run.")
    return _enqueue(run, ENDED, actor, resumed_from=checkpoint, verb="resumed")


def stop(run: Run, actor: User | None, *, save: bool) -> None:
    """Ask for an end. A queued run ends at once; a live one is told by its supervisor. Raises Refused when it is not live."""
    with transaction.atomic():
        attempt = run.current_attempt
        if change_state(
            run, (State.QUEUED,), State.STOPPED, "Stopped before it started.", attempt=attempt, actor=actor
        ):
            return
        desired = Desired.STOP_AND_SAVE if save else Desired.STOP
        changed = Run.objects.filter(
            pk=run.pk, state__in=(State.STARTING, State.RUNNING, State.STOPPING)
        ).update(desired=desired)  # fmt: skip
        if not changed:
            run.refresh_from_db()
            raise Refused(f"The run is {run.state}; only a queued, starting or running one can be stopped.")
        text = "Asked to save a checkpoint and stop." if save else "Asked to stop now."
        record(run, "stop_requested", text, attempt=attempt, actor=actor, save=save)
    run.refresh_from_db()


def notify_queued() -> None:
    """Tell the workers that there is something to claim. A lost message costs seconds: beat looks too."""
    app.send_task("workers.claim_queued", ignore_result=True)


def _enqueue(
    run: Run, old: Iterable[State], actor: User | None, *, resumed_from: Checkpoint | None, verb: str
) -> Attempt:
    try:
        values_of(run)
    except Missing as error:
        raise Refused(str(error)) from error
    with transaction.atomic():
        who = f" by {actor.username}" if actor else ""
        where = f" from step {resumed_from.step}" if resumed_from else (" from the start" if verb == "resumed" else "")
        fields: dict[str, Any] = {"desired": Desired.RUN, "queued_at": timezone.now(), "ended_at": None}
        if not change_state(run, old, State.QUEUED, f"Waits for a worker; {verb}{where}{who}.", actor=actor, **fields):
            run.refresh_from_db()
            raise Refused(f"The run is {run.state}, so it can't be {verb}.")
        newest = run.current_attempt
        number = newest.number + 1 if newest else 1
        attempt = Attempt.objects.create(run=run, number=number, resumed_from=resumed_from)
        # Robust: the run is queued whether or not the broker answers, and the person must not see an error page.
        transaction.on_commit(notify_queued, robust=True)
    return attempt
