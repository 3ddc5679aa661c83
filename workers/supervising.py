"""The half of a supervisor that a run and a playground server share: vLLM servers, watched, started again, and ended.

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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from webapp.runs.models import Attempt, Follower, State, server_log  # noqa: E402
from webapp.secrets.services import Missing  # noqa: E402
from workers import failures, leases, processes  # noqa: E402
from workers.ending import Outcome, persist  # noqa: E402
from workers.launching import environment  # noqa: E402
from workers.preparation import CannotStart  # noqa: E402
from workers.server import Server  # noqa: E402
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
    """What holds devices (`holder`), its servers, and the end of both. `serve` makes a server's command."""

    def __init__(self, holder: H, serve: Callable[..., Command] = serve_command) -> None:
        self.holder: H = holder
        self.serve = serve
        self.servers: list[Server] = []
        self.terminated = 0
        self._wake = threading.Event()
        self._heartbeat_due = 0.0

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
    def report_death(self, text: str, log: list[str], *, given_up: bool) -> None:
        """A server died and is started again, unless it is given up."""

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

    def start_servers(self, spec: RunSpec, model: Path, held: leases.Holding, secrets: Mapping[str, str]) -> list[str]:
        """Start all servers at the same time, each on a leased port and on its GPUs, and wait until they are ready.

        Returns their addresses.
        """
        replicas = spec.resources.server_replicas
        for number in range(replicas):
            port = leases.lease_port(self.holder, PORT_PURPOSE)
            command = self.serve(
                spec, model_path=str(model), port=port, device=held.device, gpu_share=held.gpu_share, apart=held.apart
            )
            gpus = held.gpus_of(number, replicas)
            env = environment(str(self.holder.pk), gpus, held.device, command.env, secrets)
            log = self.holder.folder / server_log(number)
            name = "The vLLM server" if replicas == 1 else f"vLLM server {number}"
            self.servers.append(Server(command, env, port, log, spec.server.startup_timeout, name))
        for server in self.servers:
            server.start()
            self.write_record()
        while not all(server.ready for server in self.serving()):
            self.watch_servers(spec.server.max_restarts)
            self.progress(starting(self.servers))
        return [server.url for server in self.serving()]

    def serving(self) -> list[Server]:
        """The servers that were not given up."""
        return [server for server in self.servers if not server.given_up]

    def watch_servers(self, max_restarts: int) -> None:
        """Start servers again that died or never got ready; raise Ended when that happened too often to the last one."""
        for server in self.serving():
            self._watch_server(server, max_restarts)

    def _watch_server(self, server: Server, max_restarts: int) -> None:
        if not server.is_down():
            server.check_ready()
            return
        if self.is_stopping():
            return
        why, log = server.why(), failures.last_lines(server.log_text())
        server.kill()
        if not server.served:
            # What keeps it from starting once will do so again, and the sentence says what to change.
            said = why if len(self.servers) == 1 else f"{server.name} did not start: {why}"
            raise Ended(Outcome(State.FAILED, said, log))
        if server.restarts < max_restarts:
            server.restarts += 1
            server.start()
            self.write_record()
            text = f"{server.name} died and is started again: {why}"
        else:
            times = f" again after {max_restarts} restart{'' if max_restarts == 1 else 's'}" if max_restarts else ""
            server.given_up = True
            text = f"{server.name} died{times}: {why}"
            if not self.serving():
                raise Ended(Outcome(State.FAILED, text, log))
            text = f"{text.rstrip('.')}. The run goes on with the others; resume it to have all servers again."
        self.ask_database(lambda: self.report_death(text, log, given_up=server.given_up))

    def is_stopping(self) -> bool:
        """Whether a server that dies now is not missed."""
        return False

    def end_processes(self) -> dict[str, list[int]]:
        """End the servers and all else that belongs to the holder, until nothing is found.

        Returns the devices that can't be given back, and the pids on them.
        """
        if self.servers:
            with ThreadPoolExecutor(len(self.servers)) as pool:  # each may take some 20 s
                list(pool.map(Server.stop, self.servers))
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
        blocks: set[str] = set().union(*(server.blocks for server in self.servers))
        processes.write_record(self.holder.folder, self._groups(), blocks)

    def _groups(self) -> set[int]:
        return {child.pid for child in self.children()}.union(*(server.groups for server in self.servers))

    def children(self) -> list[subprocess.Popen[bytes]]:
        """Processes that were started here and whose exit code is still wanted."""
        return [server.process for server in self.servers if server.process]

    def on_signal(self, number: int, _frame: object) -> None:
        """SIGTERM: the studio is shut down."""
        logger.info("Received %s", signal.Signals(number).name)
        self.terminated += 1
        self._wake.set()


def starting(servers: Sequence[Server]) -> str:
    """How far they are, as a sentence."""
    if len(servers) == 1:
        return f"Starts the vLLM server: {servers[0].progress()}."
    phrases = Counter("ready" if server.ready else server.progress() for server in servers)
    parts = ", ".join(f"{count} {phrase}" for phrase, count in phrases.items())
    return f"Starts {len(servers)} vLLM servers: {parts}."


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
