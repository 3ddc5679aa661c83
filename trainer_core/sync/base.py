"""What the trainer sees of a weight push."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from trainer_core.sync.server_api import ServerApi, ServerUnreachable, WeightSyncError

PHASES = ("announce", "stop", "apply", "resume")
"""Telling the servers what comes; waiting until they stand still; putting the weights in place; letting them go on."""


@dataclass(frozen=True)
class PushReport:
    """Seconds of one push: all of it, generation paused, bytes under way; and of the other `PHASES` that it had, by name."""

    total_s: float
    pause_s: float
    transfer_s: float
    phases: Mapping[str, float] = field(default_factory=dict)


class WeightSync(Protocol):
    """Keeps the servers' weights those of the trainer. Every call has a deadline and raises WeightSyncError.

    ServerUnreachable, a kind of it, names a server that is gone: `reopen`, then `push` again.
    """

    def open(self) -> None:
        """Connect to the servers, which must be ready."""

    def push(self, model: nn.Module, version: int) -> PushReport:
        """Give the servers the model's weights as they are now. Called by rank 0, which calls the others if it needs them."""

    def reopen(self) -> list[str]:
        """Connect anew, to the servers that answer now; the weights must be pushed again. Gives the URLs of the others.

        Raises ServerUnreachable when none answers.
        """

    def model_name(self, version: int) -> str:
        """The name under which the servers offer this version."""

    def close(self) -> None:
        """Disconnect. The servers keep the last weights."""


def together(
    what: str,
    deadline_s: float,
    calls: Sequence[Callable[[], None]],
    meanwhile: Callable[[Callable[[], bool]], None] | None = None,
) -> None:
    """Run calls at the same time, until all are done or one fails.

    Raises the first failure at once, or WeightSyncError after `deadline_s`. Calls still running are abandoned: they are on
    daemon threads, and end by their own deadlines. `meanwhile` runs on this thread and always to its end; the function it
    gets tells whether a call has failed or the time is over.
    """
    end = time.monotonic() + deadline_s
    futures = [_start(call) for call in calls]
    if meanwhile is not None:
        meanwhile(lambda: time.monotonic() > end or any(future.done() and future.exception() for future in futures))
    done, pending = wait(futures, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise WeightSyncError(f"{what} took longer than {deadline_s:.0f} s")


def _start(call: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for the future
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="weight-push", daemon=True).start()
    return future


def explain(error: Exception, servers: Sequence[ServerApi]) -> WeightSyncError:
    """The failure of a push as a WeightSyncError: ServerUnreachable when a server turns out not to answer."""
    gone = next((server for server in servers if not server.is_healthy()), None)
    if gone is not None and not isinstance(error, ServerUnreachable):
        return ServerUnreachable(gone.url, f"the server at {gone.url} stopped answering during a weight push")
    if isinstance(error, WeightSyncError):
        return error
    return WeightSyncError(f"the weights could not be sent: {str(error).splitlines()[0] if str(error) else error!r}")


def answering(servers: Sequence[ServerApi]) -> list[ServerApi]:
    """Those of the servers that answer. Raises ServerUnreachable when none does."""
    found = [server for server in servers if server.is_healthy()]
    if not found:
        raise ServerUnreachable(servers[0].url, f"the server at {servers[0].url} does not answer")
    return found


class Stopwatch:
    """Seconds since it was made, or since the last lap; `laps` adds up those that have a name."""

    def __init__(self) -> None:
        self._start = self._lap = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str = "") -> float:
        now = time.monotonic()
        lap, self._lap = now - self._lap, now
        if name:
            self.laps[name] = self.laps.get(name, 0.0) + lap
        return lap

    def total(self) -> float:
        return time.monotonic() - self._start
