"""Writers of one SQLite database take turns.

SQLite lets one write at a time, and the others ask again in growing pauses, unfairly: with dozens of runs some would ask for
longer than the database's timeout and be told that it is locked. A lock on a file beside the database keeps them apart.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from django.conf import settings
from django.db import connection

logger = logging.getLogger(__name__)
LONGEST_WAIT_S = 20.0
_PAUSE_S = 0.01


@contextmanager
def turn() -> Iterator[None]:
    """Wait for this writer's turn; with PostgreSQL there is nothing to wait for.

    A process that dies gives its turn up. One that is stuck does not hold the others for longer than `LONGEST_WAIT_S`: they
    go on without a turn, which is safe, since the database itself keeps writers apart.
    """
    if connection.vendor != "sqlite":
        yield
        return
    with open(settings.HOME / "writers.lock", "wb") as file:
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not _locked(file.fileno()):
            if time.monotonic() > deadline:
                logger.warning(
                    "Waited %.0f s for the turn to write to the database; going on without it.", LONGEST_WAIT_S
                )
                break
            time.sleep(_PAUSE_S)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
