"""Three ways to frame bytes: protocol buffer fields, TensorFlow's records, and LevelDB's log, which wandb uses."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_LEVELDB_BLOCK = 32 * 1024
_WANDB_HEADER = 7


def fields(message: bytes) -> dict[int, list[Any]]:
    """Fields of a protocol buffer by number: integers for varints, else bytes. Raises ValueError on what is none."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        value: Any
        if wire == 0:
            value, at = _varint(message, at)
            value = value - 2**64 if value >= 2**63 else value
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = message[at : at + size], at + size
        elif wire == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(f"a protocol buffer has wire type {wire}")
        if at > len(message):
            raise ValueError("a protocol buffer ends in the middle of a field")
        found.setdefault(number, []).append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a protocol buffer ends in the middle of a number")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def tf_records(data: bytes) -> Iterator[bytes]:
    """Records of an event file, up to one that is still being written. Checksums are passed over."""
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if at + 12 + size + 4 > len(data):
            return
        yield data[at + 12 : at + 12 + size]
        at += 12 + size + 4


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a wandb log, up to one that is still being written. Raises ValueError when it is none."""
    if data[:4] != b":W&B":
        raise ValueError("it does not begin as a wandb file does")
    at = _WANDB_HEADER
    parts: list[bytes] = []
    while at + 7 <= len(data):
        left = _LEVELDB_BLOCK - at % _LEVELDB_BLOCK
        if left < 7:
            at += left  # a header never lies across blocks
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            at += left  # the rest of a block that was given up
            continue
        if at + 7 + size > len(data):
            return
        part = data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 2):  # whole, first
            parts = []
        parts.append(part)
        if kind in (1, 4):  # whole, last
            yield b"".join(parts)
            parts = []
