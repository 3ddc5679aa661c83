"""The supervisor: one process for each attempt of a run, in its own session, that starts, watches and ends the others.

`Supervisor.work` is the life of an attempt and can be read from top to bottom; `Supervisor.end` is how nothing stays
behind. The server half is in supervising.py. Desired state is read from the database, so a stop works from any host.

usage: python -m workers.supervisor --attempt UUID
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

# First: it sets Django up.
from workers.supervising import DATABASE_DEADLINE_S, TICK_S, Ended, Supervising, supervise  # isort: skip

from django.db import transaction

from webapp.runs.lifecycle import change_state, record
from webapp.runs.models import ACTIVE, Attempt, AttemptServer, Desired, Event, Run, State
from webapp.secrets.services import redactor_of
from workers import failures, leases, processes
from workers.ending import Outcome, conclude, last_event, persist, trainer_outcome
from workers.followers import meeting
from workers.followers.watching import Followers
from workers.launching import TrainerPlan, check_command, environment, train_command
from workers.preparation import (
    INPUTS_LOG,
    check_inputs,
    find_model,
    judge_inputs,
    prepare_folder,
    run_secrets,
    starting_weights,
    write_atomically,
)
from workers.serving import Command, serve_command
from workers.shipping import Shipper

logger = logging.getLogger("workers.supervisor")

CHECK_TICK_S = 0.1
"""Between looks while the inputs are checked, which takes little longer."""
STOP_GRACE_S = 30.0
"""How long a trainer may take to stop before it gets SIGTERM."""
SAVE_GRACE_S = 900.0
"""How long it may take to finish its step, save a checkpoint and stop."""
SHUTDOWN_GRACE_S = 45.0
"""The same when the studio is shut down and somebody waits at a terminal."""
TERM_GRACE_S = 10.0
SHIP_DEADLINE_S = 120.0


class Supervisor(Supervising[Attempt]):
    def __init__(
        self, attempt: Attempt, serve: Callable[..., Command] = serve_command,
        train: Callable[[TrainerPlan], Command] = train_command,
        check: Callable[[Path, Path | None], Command] = check_command,
    ) -> None:  # fmt: skip
        super().__init__(attempt, serve)
        self.attempt = attempt
        self.run: Run = attempt.run
        self.train_command = train
        self.check_command = check
        self.checker: subprocess.Popen[bytes] | None = None
        self.trainer: subprocess.Popen[bytes] | None = None
        self.shipper = Shipper(attempt)
        self.desired: str = Desired.RUN
        self.followers = Followers(attempt)
        self._stop_deadline = float("inf")
        self._reason = self.run.reason
        self._steps = False
        self._shipper_died = 0.0
        self._told: dict[int, dict[str, object]] = {}

    def work(self) -> Outcome | None:
        """Prepare, start server and trainer, watch both until the trainer ends. Returns what became of the attempt."""
        spec = self.run.run_spec()
        self.say("Checks the inputs of the run.")
        prepare_folder(self.attempt, spec)
        resume = check_inputs(self.attempt, spec)
        self.shipper.start()
        self.tick()
        secrets = run_secrets(self.run, spec)
        held = leases.holding(self.attempt)
        command = self.check_command(self.run.folder, resume)
        env = environment(str(self.attempt.pk), [], "cpu", command.env, secrets)
        self.checker = processes.start(command.argv, env=env, log=self.attempt.folder / INPUTS_LOG)
        model = find_model(spec, self.attempt.folder, self.progress_unless_refused, secrets)
        while not self.inputs_are_good():
            self.progress("Loads prompts, rewards and tools.", CHECK_TICK_S)
        servers = self.start_servers(spec, model, held, secrets)

        ranks = spec.resources.ranks(on_cpu=held.device == "cpu")
        plan = TrainerPlan(
            self.run.folder, self.attempt.folder, model, servers, resume, ranks,
            meeting.open_for(self.attempt) if ranks > 1 else None,
            start=starting_weights(self.attempt), hosts=spec.resources.trainer_hosts,
        )  # fmt: skip
        command = self.train_command(plan)
        extra = command.env | meeting.network(self.attempt.host, plan.hosts)
        env = environment(str(self.attempt.pk), held.trainer_gpus, held.device, extra, secrets)
        self.trainer = processes.start(command.argv, env=env, log=self.attempt.folder / "trainer.log")
        self.write_record()
        are = "server is" if len(servers) == 1 else "servers are"
        self.progress(f"The {are} ready; the trainer loads the model.")
        while self.trainer.poll() is None:
            self.tick()
            self.ask_database(self.follow_trainer)
            self.watch_servers(spec.server.max_restarts)
            self.escalate()
        return self.judge(self.trainer.returncode)

    def tick(self, wait_s: float = TICK_S) -> None:
        """As above, and the run's logs and lines looked after."""
        super().tick(wait_s)
        self.ask_database(self._tell_servers)
        self.ask_database(self._redact_logs)
        self._keep_shipping()

    def talk(self) -> None:
        """SIGTERM saves and stops; a second one does not wait for the save (`escalate`)."""
        if self.terminated and self.desired == Desired.RUN:
            self._ask_to_stop(Desired.STOP_AND_SAVE)
        self._read_desired()
        if trouble := self.followers.trouble(trains=self.trainer is not None):
            raise Ended(Outcome(State.FAILED, trouble))

    def _tell_servers(self) -> None:
        """Write down what the run's page says of each server, where it has changed."""
        for number, server in enumerate(self.servers):
            state = AttemptServer.State.READY if server.ready else AttemptServer.State.STARTING
            if server.given_up:
                state = AttemptServer.State.FAILED
            progress = server.progress() if state == AttemptServer.State.STARTING else ""
            told = {"port": server.port, "state": state, "progress": progress, "restarts": server.restarts}
            if told != self._told.get(number):
                AttemptServer.objects.update_or_create(attempt=self.attempt, number=number, defaults=told)
                self._told[number] = told

    def _redact_logs(self) -> None:
        """Takes the run's secrets out of its logs, seconds after they were written there."""
        if self.run.spec.get("secrets"):
            redactor = redactor_of(self.run)
            for path in self.attempt.folder.glob("*.log"):
                redactor.file(path)

    def _read_desired(self) -> None:
        row = self.run.attempts.order_by("-number").values_list("pk", "run__state", "run__desired").first()
        assert row is not None
        newest, state, desired = row
        if newest != self.attempt.pk or state not in (*ACTIVE, State.LOST):
            logger.warning("The run is %s and its newest attempt is %s; this one gives up", state, newest)
            raise Ended(None)
        if state == State.LOST:
            self._readopt()
        if desired not in (self.desired, Desired.RUN):
            self._ask_to_stop(desired)

    def _readopt(self) -> None:
        """The reaper took this attempt for lost, since no heartbeat came through; it is alive, and says so."""
        state = State.RUNNING if self._steps else State.STARTING
        with transaction.atomic():
            reason = "Found again: its host reports once more."
            if change_state(self.run, (State.LOST,), state, reason, attempt=self.attempt, ended_at=None):
                Attempt.objects.filter(pk=self.attempt.pk).update(ended_at=None)
        self._reason = reason

    def _ask_to_stop(self, desired: str) -> None:
        """Pass a wish to stop on to the trainer and set the time it has; without a trainer the end is now."""
        self.desired = desired
        if self.trainer is None:
            why = "The studio was shut down; resume to go on." if self.terminated else "Stopped before training began."
            raise Ended(Outcome(State.STOPPED, why))
        grace = STOP_GRACE_S if desired == Desired.STOP else SAVE_GRACE_S
        if self.terminated:
            grace = min(grace, SHUTDOWN_GRACE_S)
        self._stop_deadline = time.monotonic() + grace
        write_atomically(self.attempt.folder / "control", desired)
        reason = "Saves a checkpoint, then stops." if desired == Desired.STOP_AND_SAVE else "Stops."
        change_state(self.run, (State.STARTING, State.RUNNING), State.STOPPING, reason, attempt=self.attempt)
        self._reason = reason

    def progress_unless_refused(self, sentence: str) -> None:
        """`progress` of something long beside the check of the inputs, whose verdict ends it."""
        self.progress(sentence)
        self.inputs_are_good()

    def inputs_are_good(self) -> bool:
        """Whether the check of the inputs has ended well; False while it runs. Raises CannotStart with what it found."""
        assert self.checker is not None
        if self.checker.poll() is None:
            return False
        judge_inputs(self.attempt, self.checker.returncode)
        return True

    def say(self, sentence: str) -> None:
        if sentence == self._reason:
            return
        self._reason = sentence
        self.ask_database(lambda: Run.objects.filter(pk=self.run.pk, state__in=ACTIVE).update(reason=sentence))

    def follow_trainer(self) -> None:
        """Move the run on when the trainer reports that it started, and that the first step is done."""
        if self.desired != Desired.RUN or self._steps:
            return
        event = last_event(self.attempt, "started", "first_step")
        if event is None:
            return
        reason = "Trains." if event.name == "first_step" else "The trainer is ready and waits for the first rollouts."
        if change_state(self.run, (State.STARTING,), State.RUNNING, reason, attempt=self.attempt):
            self._reason = reason
        self.say(reason)
        self._steps = event.name == "first_step"

    def is_stopping(self) -> bool:
        return self.desired != Desired.RUN

    def report_death(self, text: str, log: list[str], *, given_up: bool) -> None:
        name, level = "server_restarted", Event.Level.WARNING
        if given_up:
            name, level = "server_given_up", Event.Level.ERROR
        restarts = sum(server.restarts for server in self.servers)
        with transaction.atomic():
            Attempt.objects.filter(pk=self.attempt.pk).update(server_restarts=restarts)
            record(self.run, name, text, attempt=self.attempt, level=level, log=log)

    def escalate(self) -> None:
        """SIGTERM, then SIGKILL, to a trainer that did not stop in the time it had."""
        assert self.trainer is not None
        if self.terminated > 1:
            self._stop_deadline = min(self._stop_deadline, time.monotonic())
        if time.monotonic() > self._stop_deadline:
            logger.warning("The trainer did not stop in time; ending it")
            processes.end(self.trainer, TERM_GRACE_S)

    def judge(self, returncode: int) -> Outcome:
        """What became of the attempt, once everything the trainer reported is in the database."""
        late = time.monotonic() > self._stop_deadline
        self.shipper.finish(SHIP_DEADLINE_S)
        log_text = failures.tail(self.attempt.folder / "trainer.log")
        lines = failures.last_lines(log_text) if returncode else []

        def explain() -> str:
            if late:
                what = "save a checkpoint and stop" if self.desired == Desired.STOP_AND_SAVE else "stop"
                return f"The trainer did not {what} in time and was killed; resume to go on from the last checkpoint."
            return failures.explain("The trainer", returncode, log_text)

        outcome = persist(
            lambda: trainer_outcome(self.attempt, returncode, self.desired, explain, lines), DATABASE_DEADLINE_S
        )
        outcome = persist(lambda: self.followers.explain(outcome), DATABASE_DEADLINE_S)
        if not self.terminated or outcome.state == State.COMPLETED:
            return outcome
        saved = "" if outcome.state == State.STOPPED else "; there was no time to save a checkpoint"
        return Outcome(State.STOPPED, f"The studio was shut down{saved}; resume to go on.", lines, returncode)

    def end(self, outcome: Outcome | None) -> None:
        """End every process of the attempt, prove that none is left, ship the rest, give the devices back."""
        if self.checker is not None:
            processes.end(self.checker, TERM_GRACE_S)
        if self.trainer is not None:
            processes.end(self.trainer, TERM_GRACE_S)
        keep = self.end_processes()
        self.shipper.finish(SHIP_DEADLINE_S)
        self.ask_database(self._redact_logs)
        final = outcome or Outcome(State.STOPPED, "A newer attempt took over.")
        persist(lambda: conclude(self.attempt, final, keep), DATABASE_DEADLINE_S)
        logger.info("%s: %s", final.state, final.reason)

    def children(self) -> list[subprocess.Popen[bytes]]:
        return [*super().children(), *(child for child in (self.checker, self.trainer) if child is not None)]

    def _keep_shipping(self) -> None:
        """A shipper that met an error of its own is started again after a while; training never waits for it."""
        if self.shipper.ident is None or self.shipper.is_alive():
            return
        if not self._shipper_died:
            self._shipper_died = time.monotonic()
            logger.error("The shipper ended; its traceback is above")
        elif time.monotonic() - self._shipper_died > 30:
            self._shipper_died = 0.0
            self.shipper = Shipper(self.attempt)
            self.shipper.start()


def attempt_of(attempt_id: str) -> Attempt:
    return Attempt.objects.select_related("run", "host", "resumed_from").get(pk=attempt_id)


def main(arguments: list[str] | None = None, make: Callable[[Attempt], Supervisor] = Supervisor) -> NoReturn:
    parser = argparse.ArgumentParser(description="Supervises one attempt of a run.")
    parser.add_argument("--attempt", required=True)
    supervise(partial(attempt_of, parser.parse_args(arguments).attempt), make)


if __name__ == "__main__":
    main()
