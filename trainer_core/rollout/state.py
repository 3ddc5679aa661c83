"""Training position: which prompts are done, so that a resumed run skips none and repeats none.

It is the trainer's position, not the producer's: a prompt counts once it was trained on or dropped. What was only
generated (in flight or queued when the run was killed) is generated again.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

FORMAT = 1


def prompt_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Row indices in the order in which an epoch visits them: a permutation that depends on seed and epoch only."""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


class RolloutState:
    """Weight version, and for each epoch the row indices that were trained on or dropped.

    `num_rows` is the number of rows of the dataset, 0 while unknown; the rollout worker fills it in and refuses a state
    that was saved with another dataset length.
    """

    def __init__(self, weight_version: int = 0, num_rows: int = 0) -> None:
        self.weight_version = weight_version
        self.num_rows = num_rows
        self._done: dict[int, set[int]] = {}

    def mark(self, epoch: int, row_index: int) -> None:
        """The prompt is done in this epoch. Marking it again changes nothing."""
        self._done.setdefault(epoch, set()).add(row_index)

    def is_done(self, epoch: int, row_index: int) -> bool:
        return row_index in self._done.get(epoch, ())

    def done(self, epoch: int) -> frozenset[int]:
        """Row indices done in this epoch."""
        return frozenset(self._done.get(epoch, ()))

    def prompts_done(self, epochs: float = math.inf) -> int:
        """Prompts done over all epochs, or the first so many; divided by the rows of the dataset it is the training's epoch."""
        return sum(len(rows) for epoch, rows in self._done.items() if epoch < epochs)

    def first_untrained_index(self) -> int:
        """Lowest row index not done in the oldest epoch that has one; kept for readers of the original file format."""
        for epoch in self._epochs():
            rows = self._done.get(epoch, set())
            missing = next((row for row in range(len(rows) + 1) if row not in rows), 0)
            if not self.num_rows or missing < self.num_rows:
                return missing
        return 0

    def remaining(self, seed: int, shuffle: bool = True) -> Iterator[tuple[int, int]]:
        """(epoch, row index) of every prompt still to do, in order, without end. Needs `num_rows`."""
        if not self.num_rows:
            raise ValueError("the number of dataset rows is not known")
        epoch = 0
        while True:
            done = self.done(epoch)
            if len(done) < self.num_rows:
                for row in prompt_order(self.num_rows, seed, epoch, shuffle):
                    if int(row) not in done:
                        yield epoch, int(row)
            epoch += 1

    def to_json(self) -> str:
        """One JSON object; rows are bit sets, so a hundred thousand prompts take some kilobytes."""
        return json.dumps(
            {
                "format": FORMAT,
                "weight_version": self.weight_version,
                "num_rows": self.num_rows,
                "prompts_done": self.prompts_done(),
                "first_untrained_index": self.first_untrained_index(),
                "done": {str(epoch): _pack(rows) for epoch, rows in sorted(self._done.items())},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RolloutState:
        """Inverse of `to_json`. Raises ValueError with one sentence on anything else."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']}, this version reads {FORMAT}")
            state = cls(int(data["weight_version"]), int(data["num_rows"]))
            state._done = {int(epoch): set(_unpack(packed)) for epoch, packed in data["done"].items()}
        except (KeyError, TypeError, AttributeError, ValueError, zlib.error) as error:
            raise ValueError(f"this is no rollout state: {error!r}") from error
        return state

    def _epochs(self) -> Iterable[int]:
        return range(max(self._done, default=-1) + 2)


def _pack(rows: set[int]) -> str:
    bits = np.zeros(max(rows, default=-1) + 1, dtype=bool)
    bits[list(rows)] = True
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes())).decode()


def _unpack(packed: str) -> list[int]:
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8))
    return [int(row) for row in np.flatnonzero(bits)]
