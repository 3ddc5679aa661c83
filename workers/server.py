"""The vLLM server of an attempt as a process: start, health, end, and start again after a death."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from workers import failures, processes
from workers.serving import Command, readiness, startup_failure

logger = logging.getLogger(__name__)
HEALTH_TIMEOUT_S = 2.0
HEALTH_EVERY_S = 3.0
REFUSALS_TO_DIE = 2
"""Looks at /health in a row that are refused or answered with an error, after which the server counts as dead."""
HUNG_AFTER_S = 180.0
"""A server that lets /health wait for this long counts as hung; a busy machine makes it wait for a while."""
PAUSE_TIMEOUT_S = 5.0
TERM_GRACE_S = 15.0


class Server:
    """One server on one port. After `start`, `ready` turns true once; `start` again after a death uses the same port.

    `name` begins a sentence. `restarts` are counted by who calls `start`, who may also give it up for good.
    """

    def __init__(
        self, command: Command, env: Mapping[str, str], port: int, log: Path, startup_timeout: float,
        name: str = "The vLLM server",
    ) -> None:  # fmt: skip
        self.command = command
        self.env = env
        self.port = port
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.startup_timeout = startup_timeout
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.served = False
        self.given_up = False
        self.restarts = 0
        self.groups: set[int] = set()
        self.blocks: set[str] = set()
        self._deadline = 0.0
        self._next_look = 0.0
        self._answered = 0.0
        self._refusals = 0
        self._trouble = ""
        self._log_start = 0

    def start(self) -> None:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self.process = processes.start(self.command.argv, env=self.env, log=self.log)
        self.groups.add(self.process.pid)
        self.ready = False
        self._refusals, self._trouble = 0, ""
        self._deadline = time.monotonic() + self.startup_timeout

    @property
    def returncode(self) -> int | None:
        return self.process.poll() if self.process else None

    def check_ready(self) -> bool:
        """Ask /health if it was not ready before."""
        if not self.ready and self.process is not None and self._look() == 200:
            self.ready = self.served = True
            self._answered = time.monotonic()
            self.note_shared_memory()
        return self.ready

    def is_down(self) -> bool:
        """Whether it has exited, is not ready in time, or is dead though its process lives.

        An API server whose engine was killed may wait for ever for its clients, with its port closed; hence the look at
        /health every few seconds.
        """
        if self.returncode is not None:
            return True
        if not self.ready:
            return time.monotonic() > self._deadline
        if time.monotonic() < self._next_look:
            return False
        status = self._look()
        now = time.monotonic()
        self._next_look = now + HEALTH_EVERY_S
        if status == 200:
            self._answered, self._refusals = now, 0
        elif status is not None:
            self._refusals += 1
            self._trouble = (
                f"It answered /health with {status}." if status else "Its port is closed, its process hangs."
            )
        elif now - self._answered > HUNG_AFTER_S:
            self._trouble = f"It has not answered /health for {HUNG_AFTER_S:.0f} s."
            return True
        return self._refusals >= REFUSALS_TO_DIE

    def _look(self) -> int | None:
        """Status of /health; 0 when the connection is refused, None when there is no answer in time."""
        try:
            return httpx.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S, trust_env=False).status_code
        except httpx.TimeoutException:
            return None
        except httpx.TransportError:
            return 0

    def log_text(self) -> str:
        """The end of the log since the last start."""
        size = self.log.stat().st_size if self.log.exists() else 0
        return failures.tail(self.log, max(0, min(size - self._log_start, failures.TAIL_BYTES)))

    def progress(self) -> str:
        return readiness(self.log_text())

    def why(self) -> str:
        """One sentence on why it did not come up or went down."""
        code = self.returncode
        if code is not None:
            return startup_failure(self.log_text(), code)
        if self.ready:
            return self._trouble
        return (
            f"The server was not ready within {self.startup_timeout:.0f} s (it was {self.progress()}); raise "
            "server.startup_timeout, or look at its log."
        )

    def note_shared_memory(self) -> None:
        """Remember the shared-memory blocks of the group: a killed server leaves them behind."""
        if self.process is not None:
            self.blocks |= processes.shared_memory(processes.members({self.process.pid}))

    def kill(self) -> None:
        """End the whole group at once; its engine outlives a dead API server otherwise."""
        if self.process is not None:
            self.note_shared_memory()
            processes.signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.ready = False
            processes.remove_shared_memory(self.blocks)

    def stop(self) -> None:
        """Abort what it generates, ask it to end, and kill what is left. Never waits longer than some 20 s."""
        if self.process is None:
            return
        if self.process.poll() is None:
            # With requests in flight a server may wait for its clients for minutes; aborted ones are answered at once.
            try:
                httpx.post(f"{self.url}/pause", params={"mode": "abort"}, timeout=PAUSE_TIMEOUT_S, trust_env=False)
            except httpx.TransportError as error:
                logger.info("The server does not answer a pause: %s", error)
            self.note_shared_memory()
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(TERM_GRACE_S)
        self.kill()
