"""Starting and stopping a server of one's own for a run: who may, where it goes, and how its state changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone
from pydantic import ValidationError

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.checkpoints.models import Checkpoint
from webapp.hosts.models import Device, Host, host_name
from webapp.hosts.offers import HOLDERS, fit
from webapp.hosts.placement import gpu_of
from webapp.playground.models import PlaygroundServer
from webapp.runs.lifecycle import Refused, notify_queued, record
from webapp.runs.models import ENDED, LIVE, Event, Run, State
from webapp.secrets.services import redactor_of


@dataclass(frozen=True)
class Offer:
    """What a server for a run would take, as sentences. With a `problem` it can't be started.

    `weights` are the checkpoints of which one is served whole; none where adapters are loaded into the base model.
    """

    takes: str = ""
    problem: str = ""
    host: Host | None = None
    weights: list[Checkpoint] = field(default_factory=list)


def newest(run: Run) -> PlaygroundServer | None:
    return run.playground_servers.select_related("run", "host", "owner", "checkpoint").order_by("-created_at").first()


def offer(run: Run) -> Offer:
    """Where a server would go now, and what for."""
    here = host_name()
    host = Host.objects.filter(name=here).first()
    if host is None or not host.alive:
        return Offer(problem=f"A server would run on this machine ({here}), beside the studio's web server, but no worker "
                             "reports from it; start one there.")  # fmt: skip
    if host.drained:
        return Offer(problem=f"{here} takes nothing new (drained); an admin can open it again on the page Hosts.")
    try:
        spec = run.run_spec()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return Offer(problem=f"The run's settings are not valid any more: {where}: {first['msg']}.")
    devices = list(host.devices.filter(present=True).select_related(*HOLDERS))
    if fit(devices, spec.resources.rollout_gpus, 0) is None:
        have = len({gpu_of(device.uuid) for device in devices})
        return Offer(problem=f"The run's server takes {_gpus(spec.resources.rollout_gpus)}, but {here} has {have}.")
    return Offer(_takes(spec, host, devices), host=host, weights=whole_weights(run))


def whole_weights(run: Run) -> list[Checkpoint]:
    """Kept checkpoints that are served in the base model's place, the newest first."""
    return kept(run, Checkpoint.Kind.FULL)


def kept(run: Run, kind: Checkpoint.Kind) -> list[Checkpoint]:
    """Checkpoints of a kind that are still there, the newest first."""
    found = run.checkpoints.filter(deleted_at=None, kind=kind).select_related("run").order_by("-step")
    return [checkpoint for checkpoint in found if checkpoint.folder.is_dir()]


def _takes(spec: RunSpec, host: Host, devices: list[Device]) -> str:
    free = [device for device in devices if not hasattr(device, "lease")]
    what = f"the CPU slot of {host.name}" if devices[0].kind == Device.Kind.CPU else (
        f"{_gpus(spec.resources.rollout_gpus)} of {host.name}"
    )  # fmt: skip
    if fit(free, spec.resources.rollout_gpus, 0) is not None:
        are = "is" if spec.resources.rollout_gpus == 1 else "are"
        return f"A server takes {what}, which {are} free, and is ready in about a minute."
    return f"A server takes {what}, and waits until that is free: now it is held by {held_by(devices)}."


def held_by(devices: Iterable[Device]) -> str:
    """Who holds some of these devices: "run a, the playground of b"."""
    found = list(dict.fromkeys(device.lease.held_by for device in devices if hasattr(device, "lease")))
    return ", ".join(found[:3]) + (" and others" if len(found) > 3 else "")


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def start(run: Run, actor: User, checkpoint: Checkpoint | None = None) -> PlaygroundServer:
    """Queue a server for this host; with `checkpoint`, one of the run's whole weights. Raises Refused."""
    found = offer(run)
    if found.host is None:
        raise Refused(found.problem)
    if checkpoint is not None and checkpoint not in found.weights:
        if checkpoint.run_id != run.pk or checkpoint.kind != Checkpoint.Kind.FULL:
            raise Refused(
                "This is no checkpoint of the run with whole weights; adapters are chosen in the conversation."
            )
        raise Refused(f"The checkpoint of step {checkpoint.step} is deleted; choose another one.")
    what = "base model" if checkpoint is None else f"weights of step {checkpoint.step}"
    try:
        with transaction.atomic():
            server = PlaygroundServer.objects.create(
                run=run, checkpoint=checkpoint, owner=actor, host=found.host, last_used_at=timezone.now(),
                reason=f"Waits for the worker of {found.host.name}.",
            )  # fmt: skip
            record(run, "playground_asked", f"Asked for a playground server ({what}).", actor=actor)
            old = list(run.playground_servers.filter(state__in=ENDED, leases=None).exclude(pk=server.pk))
            run.playground_servers.filter(pk__in=[item.pk for item in old]).delete()
            transaction.on_commit(notify_queued, robust=True)
    except IntegrityError as error:
        raise Refused("The run's playground has a server already, or one is on its way.") from error
    for item in old:
        shutil.rmtree(item.folder, ignore_errors=True)
    return server


def ask_to_stop(server: PlaygroundServer, actor: User) -> None:
    """A queued one ends at once, others by their supervisor. Raises Refused when it has ended."""
    text = f"Stopped by {actor.username}."
    with transaction.atomic():
        if not change(server, (State.QUEUED,), State.STOPPED, text):
            if not PlaygroundServer.objects.filter(pk=server.pk, state__in=LIVE).update(stop=text):
                raise Refused("The playground's server has ended already.")
            server.refresh_from_db()
        record(server.run, "playground_stop", "Asked the playground server to stop.", actor=actor)


def change(server: PlaygroundServer, old: Iterable[State], new: State, reason: str, **fields: Any) -> bool:
    """Move it from one of `old` to `new`, or do nothing and return False. An end is an event of the run."""
    with transaction.atomic():
        reason = redactor_of(server.run).text(reason)
        changes = {"state": new, "reason": reason, **fields}
        if new in ENDED:
            changes["ended_at"] = timezone.now()
        if not PlaygroundServer.objects.filter(pk=server.pk, state__in=list(old)).update(**changes):
            return False
        if new in ENDED:
            level = Event.Level.WARNING if new == State.FAILED else Event.Level.INFO
            record(server.run, "playground_ended", f"The playground's server ended: {reason}", level=level)
    server.refresh_from_db()
    return True


def used(server: PlaygroundServer) -> None:
    """Somebody talks to it, or waits for it: it is not idle."""
    PlaygroundServer.objects.filter(pk=server.pk).update(last_used_at=timezone.now())
