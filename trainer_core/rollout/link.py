"""The two pipes between trainer and rollout worker.

A plain pipe, not a multiprocessing.Queue: the reader sees the end of the stream as soon as the writer is dead, even in
the middle of a message, and no lock is left locked by a process that was killed. What bounds the sample queue is credit:
the worker may send `queue_maxsize` samples, and one more for each that the trainer took out.
"""

from __future__ import annotations

import pickle
import queue
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from trainer_core.rollout.types import RolloutSample


@dataclass
class QueuedSample:
    """worker -> trainer: a sample, and the order in which its group was dispatched: lower is trained first."""

    order: int
    sample: RolloutSample


@dataclass
class Heartbeat:
    """worker -> trainer: the event loop turns."""


@dataclass
class SampleTaken:
    """trainer -> worker: one sample left the queue."""


@dataclass
class TrainerWaits:
    """trainer -> worker: the trainer waits for a sample, and the queue is empty."""


class Outbox:
    """Sends messages from a thread of its own, so that `send` never blocks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        self._queue.put(message)

    def close(self, timeout: float) -> None:
        """Send what is left, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._connection.send_bytes(ForkingPickler.dumps(message))
            except (BrokenPipeError, ConnectionResetError, OSError):
                return  # the other side is gone; whoever waits for it notices by the end of its stream


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (ConnectionResetError, BrokenPipeError) as error:
        raise EOFError from error
