"""A table of measurements beside what they must reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A number that `key` of a result must reach: at most `limit`, or at least with `at_least`."""

    key: str
    title: str
    unit: str
    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def text(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:,.0f} {self.unit}".rstrip()


def table(
    bars: Iterable[Bar], results: Mapping[str, Mapping[str, Any]], peers: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """A row for each bar, a column for each result: the value, how many times better than the bar, and ok or MISSED.

    Peers have a value only: nobody promised that they reach our bars. A value that is not there is a dash.
    """
    peers = peers or {}
    lines = [_row("", "bar", [*results, *peers])]
    for bar in bars:
        cells = [_cell(bar, one.get(bar.key)) for one in results.values()]
        cells += [_value(peer.get(bar.key)) for peer in peers.values()]
        lines.append(_row(bar.title, bar.text, cells))
    return "\n".join(lines)


def _row(title: str, bar: str, cells: Sequence[str]) -> str:
    return f"{title:34}{bar:>15}" + "".join(f"{cell:>28}" for cell in cells)


def _cell(bar: Bar, value: float | None) -> str:
    if value is None:
        return "-"
    ratio = value / bar.limit if bar.at_least else bar.limit / max(value, 1e-9)
    return f"{_value(value)}  x{ratio:.1f} {'ok' if bar.met(value) else 'MISSED'}"


def _value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
