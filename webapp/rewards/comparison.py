"""Old rewards against new ones: how they are spread, what changed, and which groups would still teach something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BINS = 12
EQUAL = 1e-9
"""Rewards this close teach nothing, as in training (trainer_core/rollout/scoring.py)."""

Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Bin:
    """How many old and new rewards lie from `low` to `high`; heights are in percent of the tallest bar."""

    low: float
    high: float
    old: int
    new: int
    old_height: float = 0.0
    new_height: float = 0.0

    @property
    def exact(self) -> bool:
        return self.low == self.high

    @property
    def old_top(self) -> float:
        return 100 - self.old_height

    @property
    def new_top(self) -> float:
        return 100 - self.new_height


@dataclass(frozen=True)
class Comparison:
    """What a test showed about all its calls together. Means are None where nothing was scored."""

    count: int
    changed: int
    old_mean: float | None
    new_mean: float | None
    groups: int
    old_flat: int
    new_flat: int
    has_old: bool
    bins: list[Bin] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Sequence[Sequence[Pair]]) -> Comparison:
        """From (old, new) of each completion of each group."""
        pairs = [pair for group in groups for pair in group]
        old = [value for value, _ in pairs if value is not None]
        new = [value for _, value in pairs if value is not None]
        changed = sum(before is not None and not _same(before, after) for before, after in pairs)
        return cls(
            len(pairs), changed, _mean(old), _mean(new), len(groups),
            sum(_flat([before for before, _ in group]) for group in groups),
            sum(_flat([after for _, after in group]) for group in groups),
            bool(old), histogram(old, new),
        )  # fmt: skip


def histogram(old: Sequence[float], new: Sequence[float]) -> list[Bin]:
    """Both over the same bins: one for each value where there are few, otherwise BINS of equal width."""
    values = sorted({*old, *new})
    if not values:
        return []
    if len(values) <= BINS:
        edges = [(value, value) for value in values]
    else:
        low, width = values[0], (values[-1] - values[0]) / BINS
        edges = [(low + index * width, low + (index + 1) * width) for index in range(BINS)]
    counts = [[0, 0] for _ in edges]
    for side, found in enumerate((old, new)):
        for value in found:
            counts[_bin(value, edges)][side] += 1
    tallest = max(max(pair) for pair in counts) or 1
    return [
        Bin(low, high, before, after, round(100 * before / tallest, 2), round(100 * after / tallest, 2))
        for (low, high), (before, after) in zip(edges, counts, strict=True)
    ]


def _bin(value: float, edges: Sequence[tuple[float, float]]) -> int:
    return next((index for index, (_, high) in enumerate(edges) if value <= high), len(edges) - 1)


def _same(before: float | None, after: float | None) -> bool:
    return before is after or (before is not None and after is not None and abs(before - after) <= EQUAL)


def _flat(values: Sequence[float | None]) -> bool:
    """Whether a group teaches nothing: fewer than two scored, or all the same."""
    known = [value for value in values if value is not None]
    return len(known) < 2 or max(known) - min(known) <= EQUAL


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
