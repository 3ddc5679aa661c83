"""The supervisor of a follower: one process on each further host of a run, which starts, watches and ends the ranks there.

It gets ready while the attempt's own supervisor, on the first host, starts the server, and starts its share of the trainer
when that one has leased a port to meet at. It ends with the attempt.

usage: python -m workers.followers.supervisor --follower UUID
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

# First: it sets Django up.
from workers.supervising import DATABASE_DEADLINE_S, Ended, Supervising, supervise  # isort: skip

from trainer_core.spec import RunSpec
from webapp.playground.server import PORT_PURPOSE
from webapp.runs.lifecycle import Refused, stop
from webapp.runs.models import ACTIVE, Attempt, Follower, State
from workers import failures, leases, processes
from workers.devices import DriverFailed, computing_besides
from workers.ending import Outcome, persist
from workers.followers import meeting
from workers.followers.ending import conclude, fail
from workers.launching import TrainerPlan, environment, train_command
from workers.preparation import CannotStart, find_model, run_secrets, starting_weights
from workers.serving import Command

logger = logging.getLogger("workers.followers.supervisor")
TERM_GRACE_S = 10.0
LAST_RANKS_S = 10.0
"""How long ranks here may still take to end when the run is completed."""
LEAD_ENDED = "Trainer rank 0 on host "
"""What a rank of another host writes when it ends because the first one did, which has told why."""
SHUTDOWN_GRACE_S = 45.0
"""How long the run may take to save and stop when the worker of this host is shut down."""


class FollowerSupervisor(Supervising[Follower]):
    def __init__(self, follower: Follower, train: Callable[[TrainerPlan], Command] = train_command) -> None:
        super().__init__(follower)
        self.attempt: Attempt = follower.attempt
        self.train_command = train
        self.trainer: subprocess.Popen[bytes] | None = None
        self._reason = ""
        self._ends_at = float("inf")

    def work(self) -> Outcome | None:
        """Find the model, wait for the first host, start this host's ranks, and watch them until they end."""
        spec = self.attempt.run.run_spec()
        self.refuse_used_gpus()
        secrets = run_secrets(self.attempt.run, spec)
        model = find_model(spec, self.holder.folder, self.progress, secrets)
        while (place := meeting.found_by(self.attempt)) is None:
            self.progress("Waits for the first host of the run.")
        command = self.train_command(self.plan(spec, model, place))
        assert self.attempt.host is not None, "it has leased the port"
        meeting.reach(place, self.attempt.host.name, self.holder.host.name, self.tick)
        held = leases.holding(self.holder)
        extra = command.env | meeting.network(self.holder.host, spec.resources.trainer_hosts)
        env = environment(str(self.holder.pk), held.trainer_gpus, held.device, extra, secrets)
        self.trainer = processes.start(command.argv, env=env, log=self.holder.log("trainer"))
        self.write_record()
        while self.trainer.poll() is None:
            self.progress("Its ranks run.")
        return self.judge(self.trainer.returncode)

    def refuse_used_gpus(self) -> None:
        """Raises CannotStart when a stranger computes on a GPU that was leased: the claiming host can't see that."""
        held = leases.held_uuids(self.holder)
        try:
            found = computing_besides(held, leases.holders_of(held))
        except DriverFailed as error:
            raise CannotStart(f"The NVIDIA driver does not answer: {error}") from error
        if strangers := {uuid: pids for uuid, pids in found.items() if pids}:
            who = "; ".join(f"{uuid}: {', '.join(map(str, pids))}" for uuid, pids in strangers.items())
            raise CannotStart(f"Other processes compute on GPUs of the run ({who}); end them, and resume.")

    def plan(self, spec: RunSpec, model: Path, place: tuple[str, int]) -> TrainerPlan:
        """What this host's ranks are started with. Raises CannotStart when the run's folder is not seen here."""
        run, checkpoint = self.attempt.run, self.attempt.resumed_from
        resume = None if checkpoint is None else checkpoint.folder
        for needed in (run.folder / "spec.yaml", *([] if resume is None else [resume])):
            if not needed.exists():
                raise CannotStart(
                    f"Host {self.holder.host.name} does not see {needed}; all hosts of a run need OFFBEAT_HOME as one shared "
                    "folder."
                )
        held = leases.holding(self.holder)
        ports = self.attempt.ports.filter(purpose=PORT_PURPOSE).order_by("pk").values_list("port", flat=True)
        return TrainerPlan(
            run.folder, self.attempt.folder, model, [f"http://{place[0]}:{port}" for port in ports], resume,
            spec.resources.ranks(on_cpu=held.device == "cpu"), place, start=starting_weights(self.attempt),
            hosts=spec.resources.trainer_hosts, host_rank=self.holder.rank,
        )  # fmt: skip

    def talk(self) -> None:
        """Ends with the attempt. SIGTERM has the run save and stop; a second one, or too long a save, does not wait."""
        row = self.attempt.run.attempts.order_by("-number").values_list("pk", "state").first()
        if row is None or row[0] != self.attempt.pk or row[1] not in (*ACTIVE, State.LOST):
            if self.trainer is not None and row == (self.attempt.pk, State.COMPLETED):
                with suppress(subprocess.TimeoutExpired):  # they are about to end too, and how is worth knowing
                    self.trainer.wait(LAST_RANKS_S)
                    return
            raise Ended(Outcome(State.STOPPED, "The run ended."))
        if self.terminated and self._ends_at == float("inf"):
            self._ends_at = time.monotonic() + SHUTDOWN_GRACE_S
            try:
                stop(self.attempt.run, None, save=True)
            except Refused as error:
                logger.info("%s", error)
        if self.terminated > 1 or time.monotonic() > self._ends_at:
            raise Ended(Outcome(State.FAILED, f"Host {self.holder.host.name}, which has a part of the trainer, was shut down, "
                                "and there was no time to save a checkpoint; resume to go on."))  # fmt: skip

    def say(self, sentence: str) -> None:
        if sentence != self._reason:
            self._reason = sentence
            state = State.STARTING if self.trainer is None else State.RUNNING
            mine = Follower.objects.filter(pk=self.holder.pk, state__in=ACTIVE)
            self.ask_database(lambda: mine.update(reason=sentence, state=state))

    def report_death(self, text: str, log: list[str], *, given_up: bool) -> None:
        raise AssertionError("a follower has no server")

    def judge(self, returncode: int) -> Outcome:
        if returncode == 0:
            return Outcome(State.COMPLETED, "Its ranks ended with the run.", exit_code=0)
        log = failures.tail(self.holder.log("trainer"))
        if LEAD_ENDED in log:
            return Outcome(
                State.STOPPED, "The ranks of the first host ended, and these with them.", exit_code=returncode
            )
        what = f"The trainer's part on host {self.holder.host.name}"
        code = failures.rank_code(returncode, log)
        return Outcome(State.FAILED, failures.explain(what, code, log), failures.last_lines(log), code)

    def end(self, outcome: Outcome | None) -> None:
        """End every process of this host's part, prove that none is left, and give its devices back."""
        final = self.named(outcome or Outcome(State.STOPPED, "The run ended."))
        if final.exit_code is None:  # nobody else can tell why these ranks end
            persist(partial(fail, self.holder, final), DATABASE_DEADLINE_S)
        if self.trainer is not None:
            processes.end(self.trainer, TERM_GRACE_S)
        keep = self.end_processes()
        persist(lambda: conclude(self.holder, final, keep), DATABASE_DEADLINE_S)
        logger.info("%s: %s", final.state, final.reason)

    def named(self, outcome: Outcome) -> Outcome:
        """The outcome with this host's name in its reason, which may become that of the run."""
        name, reason = self.holder.host.name, outcome.reason
        if outcome.state != State.FAILED or f"ost {name}" in reason:
            return outcome
        return replace(outcome, reason=f"On host {name}: {reason}")

    def children(self) -> list[subprocess.Popen[bytes]]:
        return [*super().children(), *([] if self.trainer is None else [self.trainer])]


def follower_of(follower_id: str) -> Follower:
    related = ("host", "attempt__run", "attempt__host", "attempt__resumed_from")
    return Follower.objects.select_related(*related).get(pk=follower_id)


def main(
    arguments: list[str] | None = None, make: Callable[[Follower], FollowerSupervisor] = FollowerSupervisor
) -> NoReturn:
    parser = argparse.ArgumentParser(description="Supervises one further host of an attempt.")
    parser.add_argument("--follower", required=True)
    supervise(partial(follower_of, parser.parse_args(arguments).follower), make)


if __name__ == "__main__":
    main()
