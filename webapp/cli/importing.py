"""`offbeat import`: brings finished runs of other tools into a studio."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from webapp.cli.client import Api
from webapp.cli.readers import History, lines, read
from webapp.cli.transfer import patiently

BATCH_BYTES = 2**20


def import_(options: argparse.Namespace) -> int:
    histories = read(Path(options.path))
    api = Api.configured()
    for history in histories:
        name = options.name if options.name and len(histories) == 1 else history.name
        url, offset = send(api, history, name, options.tag)
        count = sum(len(values) for _, _, values in history.points)
        print(
            f"{name}: {count} points of {len(history.points)} steps from {history.source}, {offset} bytes sent\n{url}"
        )
    return 0


def send(api: Api, history: History, name: str, tags: list[str]) -> tuple[str, int]:
    """Make the run and send its points; returns its address and the bytes that are stored."""
    times = [time for _, time, _ in history.points]
    made = api.call("POST", "/imports", json={
        "name": name[:120], "source": history.source, "config": history.config, "tags": tags,
        "started_at": _moment(min(times)), "ended_at": _moment(max(times)),
    })  # fmt: skip
    offset = 0
    for batch in batches(lines(history.points)):
        path = f"/runs/{made['id']}/metrics"
        # Repeating a batch after a lost answer is harmless: its offset says which one it is.
        offset = patiently(partial(api.call, "POST", path, params={"offset": offset}, content=batch))["offset"]
    return made["url"], offset


def batches(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces, some BATCH_BYTES together."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        if held and size + len(piece) > BATCH_BYTES:
            yield b"".join(held)
            held, size = [], 0
        held.append(piece)
        size += len(piece)
    if held:
        yield b"".join(held)


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat()
