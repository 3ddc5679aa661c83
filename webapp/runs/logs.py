"""Reading logs piece by piece: a page never holds a whole file, however large it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from webapp.runs.models import Attempt
from webapp.secrets.services import redactor_of

PIECE = 128 * 1024
"""Bytes read at once."""
SCAN = 4 * 2**20
"""Bytes searched at once."""
MOST_HITS = 200
LONGEST_SHOWN = 1000
NUMBER = re.compile(r"\d+")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*\.log")
# Escape sequences: CSI (colours, cursor), OSC (titles, links) and two-character ones.
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Piece:
    """A part of a log. `text` holds whole lines of bytes `start` to `end`; `partial` the line still being written."""

    start: int
    end: int
    size: int
    text: str
    partial: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Hits:
    """Lines with a text, as (byte where the line begins, line), and the byte to search on from; None at the end."""

    lines: list[tuple[int, str]]
    next: int | None
    size: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def log_files(attempt: Attempt) -> list[Path]:
    """The attempt's logs without the run's secrets, the trainer's first. Links that lead elsewhere are left out.

    Redacted here once more, since the supervisor's turn comes some seconds after a line was written.
    """
    if not attempt.folder.is_dir():
        return []
    folder = attempt.folder.resolve()
    found = [
        path for path in folder.iterdir()
        if NAME.fullmatch(path.name) and path.is_file() and path.resolve().parent == folder
    ]  # fmt: skip
    redactor = redactor_of(attempt.run)
    for path in found if redactor else ():
        redactor.file(path)
    return sorted(found, key=lambda path: (path.name != "trainer.log", NUMBER.sub(_padded, path.name)))


def _padded(number: re.Match[str]) -> str:
    return number[0].zfill(6)


def clean(text: str) -> str:
    """Text without escape sequences; of a line rewritten with carriage returns only the last state stays."""
    lines = ANSI.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines)


def read_after(path: Path, offset: int) -> Piece:
    """What came after `offset`. A file that is shorter than that was replaced and is read from its start."""
    size = path.stat().st_size
    offset = offset if 0 <= offset <= size else 0
    raw = _read(path, offset, PIECE)
    cut = raw.rfind(b"\n") + 1
    if cut == 0 and len(raw) == PIECE:
        cut = len(raw)  # one line longer than a piece: shown in parts
    partial = raw[cut:] if offset + len(raw) >= size else b""
    return Piece(offset, offset + cut, size, clean(_decode(raw[:cut])), clean(_decode(partial)))


def read_before(path: Path, offset: int) -> Piece:
    """The whole lines that end at `offset`."""
    size = path.stat().st_size
    offset = min(max(offset, 0), size)
    start = max(0, offset - PIECE)
    raw = _read(path, start, offset - start)
    if start > 0:
        first = raw.find(b"\n") + 1
        if 0 < first < len(raw):
            start, raw = start + first, raw[first:]
    return Piece(start, offset, size, clean(_decode(raw)))


def read_end(path: Path) -> Piece:
    """The end of a log, to go on from with `read_after`."""
    size = path.stat().st_size
    whole = size - len(_read(path, max(0, size - PIECE), PIECE).rpartition(b"\n")[2])
    before = read_before(path, whole)
    after = read_after(path, whole)
    return Piece(before.start, after.end, after.size, before.text + after.text, after.partial)


def search(path: Path, words: str, offset: int = 0) -> Hits:
    """Lines from byte `offset` on that show `words`, in any case: of the next `SCAN` bytes, and at most `MOST_HITS`.

    Lines are searched as `clean` shows them. One that is longer than `SCAN` is searched in parts.
    """
    size = path.stat().st_size
    offset = min(max(offset, 0), size)
    raw = _read(path, offset, SCAN)
    if offset + len(raw) < size and (cut := raw.rfind(b"\n") + 1):
        raw = raw[:cut]
    wanted = words.casefold()
    as_shown = raw.isascii() and b"\x1b" not in raw and b"\r" not in raw
    needle = wanted.encode() if as_shown else None
    found: list[tuple[int, str]] = []
    for start, line in _lines(raw, needle):
        text = clean(_decode(line))
        if wanted in text.casefold():
            if len(found) == MOST_HITS:
                return Hits(found, offset + start, size)
            found.append((offset + start, text[:LONGEST_SHOWN]))
    end = offset + len(raw)
    return Hits(found, end if end < size else None, size)


def _lines(raw: bytes, needle: bytes | None) -> Iterator[tuple[int, bytes]]:
    """(start, line) of all lines, or of those that may hold `needle`, which is in lower case: far faster in a large log."""
    lowered = raw.lower() if needle is not None else raw
    start = 0
    while start < len(raw):
        if needle is not None:
            at = lowered.find(needle, start)
            if at < 0:
                return
            start = lowered.rfind(b"\n", start, at) + 1 or start
        stop = raw.find(b"\n", start)
        stop = len(raw) if stop < 0 else stop
        yield start, raw[start:stop]
        start = stop + 1


def _read(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")
