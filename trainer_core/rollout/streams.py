"""Prompts one after another: from a dataset whose rows have places, and from a stream, which has none.

A stream is read in its own order, by a thread, a row ahead of need. It cannot be repositioned, so a resumed run begins it anew.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

from datasets import IterableDataset

from trainer_core.rollout.tools import ToolThreads

SHUFFLE_BUFFER = 1000
_THREADS = ToolThreads()  # a read that never ends does not keep the process
Prompt = tuple[int, int, dict[str, Any]]
"""Epoch, row index (in a stream: its place in the epoch), row."""


class StreamFailure(RuntimeError):
    """The stream gives no more rows; the text is one sentence for people."""


def is_stream(dataset: Any) -> bool:
    """Whether a dataset gives its rows only one after another."""
    return isinstance(dataset, IterableDataset)


def rows_in(dataset: Any) -> float:
    """How many rows an epoch has; infinity for a stream, which does not say."""
    return float("inf") if is_stream(dataset) else len(dataset)


def first_row(dataset: Any) -> dict[str, Any] | None:
    """The first row; None without any."""
    if is_stream(dataset):
        return next(iter(dataset), None)
    return dataset[0] if len(dataset) else None


def column_names(dataset: Any) -> list[str]:
    """Names of the columns. Those of a stream that does not know them are looked up in its first row."""
    return list(dataset.column_names or first_row(dataset) or [])


async def stream_rows(stream: Any, seed: int, shuffle: bool, deadline_s: float) -> AsyncIterator[Prompt]:
    """Rows of epoch after epoch, without end.

    `shuffle` draws from a buffer of 1000 rows, anew in each epoch. Raises StreamFailure when an epoch has no rows, and when
    the stream gives none for `deadline_s` seconds or fails.
    """
    if shuffle:
        stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    for epoch in itertools.count():
        stream.set_epoch(epoch)
        rows: Iterator[dict[str, Any]] = iter(stream)
        coming = _next(rows)
        for place in itertools.count():
            try:
                async with asyncio.timeout(deadline_s):  # wait_for may lose a cancellation (Python 3.11)
                    row = await coming
            except TimeoutError:
                raise StreamFailure(f"the training stream gave no row for {deadline_s:.0f} s") from None
            # whatever reads the stream may raise: the network, a file, a generator of the user's
            except Exception as error:
                raise StreamFailure(f"the training stream failed ({type(error).__name__}: {error})") from error
            if row is None:
                break
            coming = _next(rows)
            yield epoch, place, row
        if not place:
            raise StreamFailure("the training stream has no rows")


def _next(rows: Iterator[dict[str, Any]]) -> asyncio.Future[dict[str, Any] | None]:
    """The next row, read in a thread; None at the end."""

    def read() -> dict[str, Any] | None:
        return next(rows, None)

    return asyncio.get_running_loop().run_in_executor(_THREADS, read)
