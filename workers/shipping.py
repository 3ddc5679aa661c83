"""Carries what a run writes to its spool files into the database, whole lines at a time, exactly once.

The offset of an attempt moves in the same transaction as the rows (webapp.metrics.store, webapp.rollouts.store), so a
kill between any two instructions neither loses nor doubles a line. A busy database is waited for; the trainer is not
held up, since its lines wait in the file.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from django.db import DatabaseError, InterfaceError, connection

from trainer_core.spool import ROLLOUTS_FILE, SPOOL_FILE
from webapp.metrics.lines import MAX_LINE_BYTES
from webapp.metrics.store import WrongOffset, ship_spool
from webapp.metrics.turns import turn
from webapp.rollouts.store import ship_rollouts
from webapp.runs.models import Attempt
from webapp.secrets.services import redactor_of

logger = logging.getLogger(__name__)
CHUNK_BYTES = 2 * 2**20
INTERVAL_S = 1.0
LONGEST_PAUSE_S = 15.0


@dataclass(frozen=True)
class Stream:
    """A file of an attempt's folder, the attempt's column that says how much of it is in the database, and the way there."""

    file: str
    column: str
    ship: Callable[[Attempt, int, bytes], int]


STREAMS = (
    Stream(SPOOL_FILE, "spool_offset", ship_spool),
    Stream(ROLLOUTS_FILE, "rollouts_offset", ship_rollouts),
)


def whole_lines(path: Path, offset: int, size: int = CHUNK_BYTES) -> bytes:
    """Complete lines from byte `offset` on, about `size` bytes; one line may be longer. Empty when there is none yet."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            chunk = file.read(size)
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) == size:
                chunk += file.readline(MAX_LINE_BYTES - len(chunk))
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) >= MAX_LINE_BYTES:
                    return chunk  # the store gives such a line up, with a warning
            return chunk[:end]
    except FileNotFoundError:
        return b""


def ship_next(attempt: Attempt, stream: Stream) -> int:
    """Ship one chunk of a stream; returns its size in bytes, 0 when the stream is drained. Raises DatabaseError.

    Goes on from where this object says the stream is, which costs no query while nothing is new.
    """
    offset = getattr(attempt, stream.column)
    chunk = whole_lines(attempt.folder / stream.file, offset)
    if chunk:
        chunk = redactor_of(attempt.run).apply(chunk)  # as many bytes as before
        try:
            with turn():
                stream.ship(attempt, offset, chunk)
        except (
            WrongOffset
        ) as error:  # somebody else shipped meanwhile, a reaper for one; the next call goes on from there
            logger.info("Somebody else shipped meanwhile: %s", error)
            setattr(attempt, stream.column, error.expected)
    return len(chunk)


def ship_all(attempt: Attempt) -> None:
    """Ship every whole line there is now. Raises DatabaseError; what was shipped before it stays shipped."""
    for stream in STREAMS:
        while ship_next(attempt, stream):
            pass


class Shipper(threading.Thread):
    """Ships an attempt's files in the background until `finish`, so that a slow database never holds the supervisor."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(name="shipper", daemon=True)
        self.attempt = attempt
        self._finishing = threading.Event()
        self._deadline = float("inf")

    def run(self) -> None:
        pause = INTERVAL_S
        try:
            while True:
                last = self._finishing.is_set()
                try:
                    ship_all(self.attempt)
                except (DatabaseError, InterfaceError) as error:
                    pause = min(2 * pause, LONGEST_PAUSE_S)
                    logger.warning("The database did not take the spool, trying again in %.0f s: %s", pause, error)
                    connection.close()
                    if time.monotonic() > self._deadline:
                        return
                    time.sleep(pause) if last else self._finishing.wait(pause)
                    continue
                if last:
                    return
                pause = INTERVAL_S
                self._finishing.wait(pause)
        finally:
            connection.close()

    def finish(self, deadline_s: float) -> None:
        """Ship what is left, for at most some `deadline_s`; what then remains is the reaper's."""
        self._deadline = time.monotonic() + deadline_s
        self._finishing.set()
        if self.is_alive():
            self.join(deadline_s + 2 * LONGEST_PAUSE_S)


def is_behind(attempt: Attempt) -> bool:
    """Whether whole lines of the attempt are not in the database yet."""
    return any(whole_lines(attempt.folder / stream.file, getattr(attempt, stream.column)) for stream in STREAMS)
