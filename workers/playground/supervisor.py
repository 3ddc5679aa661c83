"""The supervisor of a playground server: starts vLLM for people, and ends it when nobody talks to it any more.

usage: python -m workers.playground.supervisor --server UUID
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

# First: it sets Django up.
from workers.supervising import DATABASE_DEADLINE_S, HEARTBEAT_S, Ended, Supervising, supervise  # isort: skip

from django.conf import settings
from django.db.models.functions import Now
from django.utils import timezone

from trainer_core.spec import RunSpec
from webapp.checkpoints.exports import HUB_TOKEN
from webapp.hosts.models import Host
from webapp.playground.models import PlaygroundServer
from webapp.playground.services import change, used
from webapp.playground.serving import talking_spec
from webapp.runs.lifecycle import record
from webapp.runs.models import ACTIVE, Event, State
from webapp.secrets.services import values
from workers import leases
from workers.claiming import first_in_queue
from workers.ending import Outcome, persist
from workers.playground.ending import conclude
from workers.preparation import CannotStart, find_model
from workers.serving import Command, serve_command

GIVES_WAY_S = 60.0
"""An idle server ends after this where a queued run waits for devices of its host."""
WORKER_SILENT_FOR = timedelta(seconds=60)
"""A host whose worker has not reported for this long has none any more."""


class PlaygroundSupervisor(Supervising[PlaygroundServer]):
    def __init__(self, server: PlaygroundServer, serve: Callable[..., Command] = serve_command) -> None:
        super().__init__(server, serve)
        self._told = State.STARTING
        self._reason = server.reason
        self._look_due = 0.0

    def work(self) -> Outcome | None:
        """Find the weights, start the server, and watch it until someone or something ends it."""
        spec = self.holder.run.run_spec()
        checkpoint = self.holder.checkpoint
        self.say("Looks for the weights.")
        model = self.weights(spec)
        served = talking_spec(spec, adapters=spec.lora.enabled and checkpoint is None)
        self.start_servers(served, model, leases.holding(self.holder), {})
        while True:
            self.ask_database(self.tell_state)
            self.tick()
            self.watch_servers(spec.server.max_restarts)

    def weights(self, spec: RunSpec) -> Path:
        """The folder to serve. Raises CannotStart, and Missing."""
        checkpoint = self.holder.checkpoint
        if checkpoint is None:
            token = [HUB_TOKEN] if HUB_TOKEN in spec.secrets else []
            return find_model(spec, self.holder.folder, self.progress, values(token, self.holder.run.owner))
        if checkpoint.deleted_at or not checkpoint.folder.is_dir():
            raise CannotStart(f"The checkpoint of step {checkpoint.step} is deleted; choose another one.")
        return checkpoint.folder.resolve()

    def tell_state(self) -> None:
        """Running while the server answers, starting while it comes up again."""
        state = State.RUNNING if all(server.ready for server in self.servers) else State.STARTING
        if state == self._told:
            return
        other = State.STARTING if state == State.RUNNING else State.RUNNING
        reason = "Ready." if state == State.RUNNING else "The server died and is started again."
        if change(self.holder, (other,), state, reason):
            used(self.holder)
        self._told, self._reason = state, reason

    def talk(self) -> None:
        row = PlaygroundServer.objects.filter(pk=self.holder.pk).values_list("state", "stop", "last_used_at").first()
        if row is None or row[0] not in ACTIVE:
            raise Ended(None)
        _, stop, last_used = row
        if self.terminated:
            raise Ended(Outcome(State.STOPPED, "The studio was shut down."))
        if stop:
            raise Ended(Outcome(State.STOPPED, stop))
        if time.monotonic() < self._look_due:
            return
        self._look_due = time.monotonic() + HEARTBEAT_S
        host = self.holder.host
        if Host.objects.filter(pk=host.pk, last_seen_at__lt=Now() - WORKER_SILENT_FOR).exists():
            raise Ended(Outcome(State.STOPPED, f"The worker of {host.name} stopped, and nothing is served without it."))
        if self._told == State.RUNNING and last_used is not None:
            self.end_if_idle((timezone.now() - last_used).total_seconds())

    def end_if_idle(self, seconds: float) -> None:
        """Raises Ended when nobody has used it for too long; that is sooner where a run waits."""
        if seconds > settings.PLAYGROUND_IDLE_S:
            minutes = f"{settings.PLAYGROUND_IDLE_S / 60:g}"
            raise Ended(Outcome(State.STOPPED, f"Nobody talked to it for {minutes} min."))
        if seconds > GIVES_WAY_S and (run := first_in_queue(self.holder.host)):
            text = f"Nobody talked to it for {GIVES_WAY_S:.0f} s, and run {run.name} waits for devices of its host."
            raise Ended(Outcome(State.STOPPED, text))

    def say(self, sentence: str) -> None:
        if sentence != self._reason:
            self._reason = sentence
            mine = PlaygroundServer.objects.filter(pk=self.holder.pk, state__in=ACTIVE)
            self.ask_database(lambda: mine.update(reason=sentence))

    def report_death(self, text: str, log: list[str], *, given_up: bool) -> None:
        record(self.holder.run, "playground_restarted", text, level=Event.Level.WARNING, log=log)

    def end(self, outcome: Outcome | None) -> None:
        keep = self.end_processes()
        persist(lambda: conclude(self.holder, outcome, keep), DATABASE_DEADLINE_S)


def server_of(server_id: str) -> PlaygroundServer:
    return PlaygroundServer.objects.select_related("run__owner", "host", "checkpoint__run").get(pk=server_id)


def main(
    arguments: list[str] | None = None, make: Callable[[PlaygroundServer], PlaygroundSupervisor] = PlaygroundSupervisor
) -> NoReturn:
    parser = argparse.ArgumentParser(description="Supervises one playground server.")
    parser.add_argument("--server", required=True)
    supervise(partial(server_of, parser.parse_args(arguments).server), make)


if __name__ == "__main__":
    main()
