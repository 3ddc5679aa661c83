"""The half of a supervisor that a run and a playground server share: one vLLM server, watched, started again, and ended.

`Supervising.work` is what the two do differently; everything around it, until nothing is left, is here.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django.setup()

import psutil  # noqa: E402
from django.db import DatabaseError, InterfaceError, connection  # noqa: E402
from django.db.models.functions import Now  # noqa: E402

from trainer_core.spec import RunSpec  # noqa: E402
from webapp.playground.models import PlaygroundServer  # noqa: E402
from webapp.playground.server import PORT_PURPOSE  # noqa: E402
from webapp.runs.models import Attempt, Follower, State  # noqa: E402
from webapp.secrets.services import Missing  # noqa: E402
from workers import failures, leases, processes  # noqa: E402
from workers.ending import Outcome, persist  # noqa: E402
from workers.launching import environment  # noqa: E402
from workers.preparation import CannotStart  # noqa: E402
from workers.server import SERVER_LOG, Server  # noqa: E402
from workers.serving import Command, serve_command  # noqa: E402

logger = logging.getLogger(__name__)

TICK_S = 1.0
HEARTBEAT_S = 3.0
DATABASE_DEADLINE_S = 900.0
GPU_RELEASE_DEADLINE_S = 60.0

H = TypeVar("H", Attempt, PlaygroundServer, Follower)


class Ended(Exception):
    """It ends now, as `outcome` says; None when the database has ended it already, or given it to another one."""

    def __init__(self, outcome: Outcome | None) -> None:
        self.outcome = outcome


class Supervising(ABC, Generic[H]):
    """What holds devices (`holder`), its server, and the end of both. `serve` makes the server's command."""

    def __init__(self, holder: H, serve: Callable[..., Command] = serve_command) -> None:
        self.holder: H = holder
        self.serve = serve
        self.server: Server | None = None
        self.terminated = 0
        self._wake = threading.Event()
        self._heartbeat_due = 0.0
        self._restarts = 0
        self._served = False

    @abstractmethod
    def work(self) -> Outcome | None:
        """Everything from the first look to the end. May raise what `live` understands."""

    @abstractmethod
    def talk(self) -> None:
        """About once a second: what the database wants to know and to say. Raises Ended when there is no reason to go on."""

    @abstractmethod
    def say(self, sentence: str) -> None:
        """Tell the page what is waited for."""

    @abstractmethod
    def report_restart(self, text: str, log: list[str]) -> None:
        """A server died and is started again."""

    @abstractmethod
    def end(self, outcome: Outcome | None) -> None:
        """End every process and give back what is held. Called once, whatever happened."""

    def live(self) -> Outcome | None:
        """`work`, with what may go wrong as a sentence."""
        try:
            return self.work()
        except (CannotStart, leases.NoPort, Missing) as error:
            return Outcome(State.FAILED, str(error))
        except OSError as error:
            logger.exception("The supervisor could not go on")
            reason = f"On the run's host: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}."
            return Outcome(State.FAILED, failures.recognise(reason) or reason)
        except Ended as end:
            return end.outcome

    def tick(self, wait_s: float = TICK_S) -> None:
        """Some waiting, then heartbeat and `talk`. Raises Ended when there is no reason to go on."""
        if self._wake.wait(wait_s):
            self._wake.clear()
        processes.reap_orphans(own=[child.pid for child in self.children()])
        self.ask_database(self._heartbeat)
        self.ask_database(self.talk)

    def ask_database(self, action: Callable[[], object]) -> None:
        """Talk to the database if it answers. Serving does not need it, and what was missed is made up for later."""
        try:
            action()
        except (DatabaseError, InterfaceError) as error:
            logger.warning("The database does not answer: %s", error)
            connection.close()

    def _heartbeat(self) -> None:
        if time.monotonic() >= self._heartbeat_due:
            type(self.holder).objects.filter(pk=self.holder.pk).update(heartbeat_at=Now())
            self._heartbeat_due = time.monotonic() + HEARTBEAT_S

    def progress(self, sentence: str, wait_s: float = TICK_S) -> None:
        """`tick`, with the page saying what is waited for."""
        self.tick(wait_s)
        self.say(sentence)

    def start_server(self, spec: RunSpec, model: Path, held: leases.Holding, secrets: Mapping[str, str]) -> Server:
        """Start the server on a leased port and wait until it is ready."""
        port = leases.lease_port(self.holder, PORT_PURPOSE)
        command = self.serve(
            spec, model_path=str(model), port=port, device=held.device, gpu_share=held.gpu_share, apart=held.apart
        )
        env = environment(str(self.holder.pk), held.server_gpus, held.device, command.env, secrets)
        log = self.holder.folder / SERVER_LOG
        self.server = Server(command, env, port, log, spec.server.startup_timeout)
        self.server.start()
        self.write_record()
        while not self.server.ready:
            self.watch_server(spec.server.max_restarts)
            self.progress(f"Starts the vLLM server: {self.server.progress()}.")
        self._served = True
        return self.server

    def watch_server(self, max_restarts: int) -> None:
        """Start a server again that died or never got ready; raise Ended when that happened too often."""
        server = self.server
        assert server is not None
        if not server.is_down():
            server.check_ready()
            return
        if self.is_stopping():
            return
        was_ready, why, log = server.ready, server.why(), failures.last_lines(server.log_text())
        server.kill()
        if not self._served and not was_ready:
            # What keeps it from starting once will do so again, and the sentence says what to change.
            raise Ended(Outcome(State.FAILED, why, log))
        if self._restarts >= max_restarts:
            times = f" again after {max_restarts} restart{'' if max_restarts == 1 else 's'}" if max_restarts else ""
            raise Ended(Outcome(State.FAILED, f"The vLLM server died{times}: {why}", log))
        self._restarts += 1
        server.start()
        self.write_record()
        self.ask_database(lambda: self.report_restart(f"The vLLM server died and is started again: {why}", log))

    def is_stopping(self) -> bool:
        """Whether a server that dies now is not missed."""
        return False

    def end_processes(self) -> dict[str, list[int]]:
        """End the server and all else that belongs to the holder, until nothing is found.

        Returns the devices that can't be given back, and the pids on them.
        """
        if self.server is not None:
            self.server.stop()
        killed, alive = processes.sweep(str(self.holder.pk), self._groups())
        logger.info("Swept %s; still alive: %s", killed or "nothing", alive or "none")
        return {uuid: alive for uuid in leases.held_uuids(self.holder)} if alive else self._wait_for_gpus()

    def _wait_for_gpus(self) -> dict[str, list[int]]:
        """A driver frees memory after its process is gone. Returns the GPUs, with pids, that are not free in time."""
        deadline = time.monotonic() + GPU_RELEASE_DEADLINE_S
        while (busy := leases.busy_gpus(self.holder)) and time.monotonic() < deadline:
            time.sleep(1)
        return busy

    def write_record(self) -> None:
        blocks = self.server.blocks if self.server else set()
        processes.write_record(self.holder.folder, self._groups(), blocks)

    def _groups(self) -> set[int]:
        return {child.pid for child in self.children()} | (self.server.groups if self.server else set())

    def children(self) -> list[subprocess.Popen[bytes]]:
        """Processes that were started here and whose exit code is still wanted."""
        return [self.server.process] if self.server and self.server.process else []

    def on_signal(self, number: int, _frame: object) -> None:
        """SIGTERM: the studio is shut down."""
        logger.info("Received %s", signal.Signals(number).name)
        self.terminated += 1
        self._wake.set()


def enter(holder: H) -> bool:
    """Make this process the holder's supervisor; False when it has one already, or is not to be started."""
    me = psutil.Process()
    entered = type(holder).objects.filter(pk=holder.pk, state=State.STARTING, supervisor_pid=None).update(
        supervisor_pid=me.pid, supervisor_create_time=me.create_time(), heartbeat_at=Now()
    )  # fmt: skip
    holder.refresh_from_db(fields=["supervisor_pid", "supervisor_create_time"])
    return bool(entered)


def supervise(find: Callable[[], H], make: Callable[[H], Supervising[H]]) -> NoReturn:
    """The life of a supervisor process."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would report each look at /health
    processes.become_subreaper()
    holder = persist(find, DATABASE_DEADLINE_S)
    if not persist(lambda: enter(holder), DATABASE_DEADLINE_S):
        logger.warning("%s has a supervisor already, or does not start any more", holder)
        sys.exit(0)
    supervisor = make(holder)
    signal.signal(signal.SIGTERM, supervisor.on_signal)
    signal.signal(signal.SIGINT, supervisor.on_signal)
    outcome: Outcome | None = Outcome(State.FAILED, "The supervisor met an error of its own; supervisor.log has it.")
    try:
        outcome = supervisor.live()
    finally:
        supervisor.end(outcome)
    sys.exit(0)
