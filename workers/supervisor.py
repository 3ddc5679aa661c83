"""The supervisor: one process for each attempt of a run, in its own session, that starts, watches and ends the others.

`Supervisor.train` is the life of an attempt and can be read from top to bottom; `Supervisor.end` is how nothing stays
behind. Desired state is read from the database, so a stop works from any host.

usage: python -m workers.supervisor --attempt UUID
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django.setup()

import psutil  # noqa: E402
from django.db import DatabaseError, InterfaceError, connection, transaction  # noqa: E402
from django.db.models.functions import Now  # noqa: E402

from webapp.runs.lifecycle import change_state, record  # noqa: E402
from webapp.runs.models import ACTIVE, Attempt, Desired, Event, Run, State  # noqa: E402
from webapp.secrets.services import Missing, redactor_of  # noqa: E402
from workers import failures, leases, processes  # noqa: E402
from workers.ending import Outcome, conclude, last_event, persist, trainer_outcome  # noqa: E402
from workers.launching import TrainerPlan, check_command, environment, train_command  # noqa: E402
from workers.preparation import (  # noqa: E402
    INPUTS_LOG,
    CannotStart,
    check_inputs,
    find_model,
    judge_inputs,
    prepare_folder,
    run_secrets,
    starting_weights,
    write_atomically,
)
from workers.server import Server  # noqa: E402
from workers.serving import Command, serve_command  # noqa: E402
from workers.shipping import Shipper  # noqa: E402

logger = logging.getLogger("workers.supervisor")

TICK_S = 1.0
CHECK_TICK_S = 0.1
"""The same while the inputs are checked, which takes little longer."""
HEARTBEAT_S = 3.0
STOP_GRACE_S = 30.0
"""How long a trainer may take to stop before it gets SIGTERM."""
SAVE_GRACE_S = 900.0
"""How long it may take to finish its step, save a checkpoint and stop."""
SHUTDOWN_GRACE_S = 45.0
"""The same when the studio is shut down and somebody waits at a terminal."""
TERM_GRACE_S = 10.0
SHIP_DEADLINE_S = 120.0
DATABASE_DEADLINE_S = 900.0
GPU_RELEASE_DEADLINE_S = 60.0


class Ended(Exception):
    """The attempt ends now, as `outcome` says; None when a newer attempt has taken the run over."""

    def __init__(self, outcome: Outcome | None) -> None:
        self.outcome = outcome


class Supervisor:
    def __init__(
        self, attempt: Attempt, serve: Callable[..., Command] = serve_command,
        train: Callable[[TrainerPlan], Command] = train_command,
        check: Callable[[Path, Path | None], Command] = check_command,
    ) -> None:  # fmt: skip
        self.attempt = attempt
        self.run: Run = attempt.run
        self.serve = serve
        self.train_command = train
        self.check_command = check
        self.checker: subprocess.Popen[bytes] | None = None
        self.server: Server | None = None
        self.trainer: subprocess.Popen[bytes] | None = None
        self.shipper = Shipper(attempt)
        self.desired: str = Desired.RUN
        self.terminated = 0
        self._wake = threading.Event()
        self._stop_deadline = float("inf")
        self._heartbeat_due = 0.0
        self._reason = self.run.reason
        self._steps = False
        self._restarts = 0
        self._shipper_died = 0.0

    def train(self) -> Outcome | None:
        """Prepare, start server and trainer, watch both until the trainer ends. Returns what became of the attempt."""
        try:
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
            port = leases.lease_port(self.attempt, "vLLM server")
            command = self.serve(
                spec, model_path=str(model), port=port, device=held.device, gpu_share=held.gpu_share, apart=held.apart
            )
            env = environment(str(self.attempt.pk), held.server_gpus, held.device, command.env, secrets)
            log = self.attempt.folder / "server-0.log"
            self.server = Server(command, env, port, log, spec.server.startup_timeout)
            self.server.start()
            self.write_record()
            while not self.server.ready:
                self.watch_server(spec.server.max_restarts)
                self.progress(f"Starts the vLLM server: {self.server.progress()}.")

            ranks = len(held.trainer_gpus) if held.device == "cuda" else spec.resources.cpu_ranks
            rendezvous = leases.lease_port(self.attempt, "trainer rendezvous") if ranks > 1 else None
            plan = TrainerPlan(
                self.run.folder, self.attempt.folder, model, [self.server.url], resume, ranks, rendezvous,
                start=starting_weights(self.attempt),
            )  # fmt: skip
            command = self.train_command(plan)
            env = environment(str(self.attempt.pk), held.trainer_gpus, held.device, command.env, secrets)
            self.trainer = processes.start(command.argv, env=env, log=self.attempt.folder / "trainer.log")
            self.write_record()
            self.progress("The server is ready; the trainer loads the model.")
            while self.trainer.poll() is None:
                self.tick()
                self._try(self.follow_trainer)
                self.watch_server(spec.server.max_restarts)
                self.escalate()
            return self.judge(self.trainer.returncode)
        except (CannotStart, leases.NoPort, Missing) as error:
            return Outcome(State.FAILED, str(error))
        except OSError as error:
            logger.exception("The supervisor could not go on")
            reason = f"On the run's host: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}."
            return Outcome(State.FAILED, failures.recognise(reason) or reason)
        except Ended as end:
            return end.outcome

    def tick(self, wait_s: float = TICK_S) -> None:
        """About a second of waiting, then heartbeat and desired state. Raises Ended when there is no reason to go on."""
        if self._wake.wait(wait_s):
            self._wake.clear()
        processes.reap_orphans(own=self._own_children())
        self._try(self._talk)
        self._try(self._redact_logs)
        self._keep_shipping()

    def _try(self, action: Callable[[], object]) -> None:
        """Talk to the database if it answers. Training does not need it, and what was missed is made up for later."""
        try:
            action()
        except (DatabaseError, InterfaceError) as error:
            logger.warning("The database does not answer: %s", error)
            connection.close()

    def _talk(self) -> None:
        if self.terminated and self.desired == Desired.RUN:
            self._ask_to_stop(Desired.STOP_AND_SAVE)
        self._heartbeat()
        self._read_desired()

    def _redact_logs(self) -> None:
        """Takes the run's secrets out of its logs, seconds after they were written there."""
        if self.run.spec.get("secrets"):
            redactor = redactor_of(self.run)
            for path in self.attempt.folder.glob("*.log"):
                redactor.file(path)

    def _heartbeat(self) -> None:
        if time.monotonic() >= self._heartbeat_due:
            Attempt.objects.filter(pk=self.attempt.pk).update(heartbeat_at=Now())
            self._heartbeat_due = time.monotonic() + HEARTBEAT_S

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

    def progress(self, sentence: str, wait_s: float = TICK_S) -> None:
        """`tick`, with the run's page saying what is waited for."""
        self.tick(wait_s)
        self.say(sentence)

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
        self._try(lambda: Run.objects.filter(pk=self.run.pk, state__in=ACTIVE).update(reason=sentence))

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

    def watch_server(self, max_restarts: int) -> None:
        """Start a server again that died or never got ready; raise Ended when that happened too often."""
        server = self.server
        assert server is not None
        if not server.is_down():
            server.check_ready()
            return
        if self.desired != Desired.RUN:
            return
        was_ready, why, log = server.ready, server.why(), failures.last_lines(server.log_text())
        server.kill()
        if self.trainer is None and not was_ready:
            # What keeps it from starting once will do so again, and the sentence says what to change.
            raise Ended(Outcome(State.FAILED, why, log))
        if self._restarts >= max_restarts:
            times = f"{max_restarts} restart{'' if max_restarts == 1 else 's'}"
            raise Ended(Outcome(State.FAILED, f"The vLLM server died again after {times}: {why}", log))
        self._restarts += 1
        server.start()
        self.write_record()
        self._try(lambda: self._report_restart(f"The vLLM server died and is started again: {why}", log))

    def _report_restart(self, text: str, log: list[str]) -> None:
        with transaction.atomic():
            Attempt.objects.filter(pk=self.attempt.pk).update(server_restarts=self._restarts)
            record(self.run, "server_restarted", text, attempt=self.attempt, level=Event.Level.WARNING, log=log)

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
        if self.server is not None:
            self.server.stop()
        killed, alive = processes.sweep(str(self.attempt.pk), self._groups())
        logger.info("Swept %s; still alive: %s", killed or "nothing", alive or "none")
        self.shipper.finish(SHIP_DEADLINE_S)
        self._try(self._redact_logs)
        keep = {uuid: alive for uuid in leases.held_uuids(self.attempt)} if alive else self._wait_for_gpus()
        final = outcome or Outcome(State.STOPPED, "A newer attempt took over.")
        persist(lambda: conclude(self.attempt, final, keep), DATABASE_DEADLINE_S)
        logger.info("%s: %s", final.state, final.reason)

    def _wait_for_gpus(self) -> dict[str, list[int]]:
        """A driver frees memory after its process is gone. Returns the GPUs, with pids, that are not free in time."""
        deadline = time.monotonic() + GPU_RELEASE_DEADLINE_S
        while (busy := leases.busy_gpus(self.attempt)) and time.monotonic() < deadline:
            time.sleep(1)
        return busy

    def write_record(self) -> None:
        blocks = self.server.blocks if self.server else set()
        processes.write_record(self.attempt.folder, self._groups(), blocks)

    def _groups(self) -> set[int]:
        groups = set(self.server.groups) if self.server else set()
        return groups | ({self.trainer.pid} if self.trainer else set())

    def _own_children(self) -> list[int]:
        owned = [self.checker, self.trainer, self.server.process if self.server else None]
        return [process.pid for process in owned if process is not None]

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

    def on_signal(self, number: int, _frame: object) -> None:
        """SIGTERM: the studio is shut down. Save and stop; the second one does not wait for the save."""
        logger.info("Received %s", signal.Signals(number).name)
        self.terminated += 1
        self._wake.set()


def enter(attempt_id: str) -> Attempt | None:
    """Make this process the supervisor of an attempt; None when it has one already, or is not to be started."""
    attempt = Attempt.objects.select_related("run", "host", "resumed_from").get(pk=attempt_id)
    me = psutil.Process()
    entered = Attempt.objects.filter(pk=attempt_id, state=State.STARTING, supervisor_pid=None).update(
        supervisor_pid=me.pid, supervisor_create_time=me.create_time(), heartbeat_at=Now()
    )
    attempt.refresh_from_db(fields=["supervisor_pid", "supervisor_create_time"])
    return attempt if entered else None


def main(arguments: list[str] | None = None, make: Callable[[Attempt], Supervisor] = Supervisor) -> NoReturn:
    parser = argparse.ArgumentParser(description="Supervises one attempt of a run.")
    parser.add_argument("--attempt", required=True)
    attempt_id = parser.parse_args(arguments).attempt
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would report each look at /health
    processes.become_subreaper()
    attempt = persist(lambda: enter(attempt_id), DATABASE_DEADLINE_S)
    if attempt is None:
        logger.warning("Attempt %s has a supervisor already, or does not start any more", attempt_id)
        sys.exit(0)
    supervisor = make(attempt)
    signal.signal(signal.SIGTERM, supervisor.on_signal)
    signal.signal(signal.SIGINT, supervisor.on_signal)
    outcome: Outcome | None = Outcome(State.FAILED, "The supervisor met an error of its own; supervisor.log has it.")
    try:
        outcome = supervisor.train()
    finally:
        supervisor.end(outcome)
    sys.exit(0)


if __name__ == "__main__":
    main()
