"""Takes secrets out of what a run wrote before anybody reads it: asterisks of the same length, so that offsets stay true."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.core.cache import cache

PIECE = 4 * 2**20


class Redactor:
    """Knows some values, in plain and as JSON writes them."""

    def __init__(self, values: Iterable[str]) -> None:
        found = {value for plain in values for value in (plain, json.dumps(plain)[1:-1])}
        self._values = sorted((value.encode() for value in found if value), key=len, reverse=True)
        self.longest = max(map(len, self._values), default=0)

    def __bool__(self) -> bool:
        return bool(self._values)

    def apply(self, data: bytes) -> bytes:
        """The same number of bytes."""
        for value in self._values:
            data = data.replace(value, b"*" * len(value))
        return data

    def text(self, text: str) -> str:
        return self.apply(text.encode(errors="surrogatepass")).decode(errors="surrogatepass") if self else text

    def json(self, data: Any) -> Any:
        """JSON data with every text redacted."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, dict):
            return {self.text(str(key)): self.json(value) for key, value in data.items()}
        return [self.json(item) for item in data] if isinstance(data, list | tuple) else data

    def file(self, path: Path) -> None:
        """Redact a file in place, from where the last call in this process ended; whoever appends to it may go on.

        Raises OSError.
        """
        if not self or not path.is_file():
            return
        status = path.stat()
        size = status.st_size
        known = hashlib.sha256(b"\n".join(self._values)).hexdigest()
        key = f"redacted:{status.st_dev}:{status.st_ino}:{known}"
        start = min(cache.get(key, 0), size)
        # A value may lie across the end of what was read, so the end is read again.
        again = self.longest - 1
        with open(path, "r+b") as file:
            while start < size:
                file.seek(start)
                data = file.read(min(PIECE, size - start))
                clean = self.apply(data)
                if clean != data:
                    os.pwrite(file.fileno(), clean, start)
                if start + len(data) >= size:
                    break
                start += len(data) - again
        cache.set(key, max(0, size - again), None)
