"""Saves the points of a piece: loads where its series stand, appends, writes back. Few statements, however many metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import psycopg
from django.db import connection

from webapp.metrics import appending
from webapp.metrics.layout import POINT, STORED_ROW
from webapp.metrics.lines import Column, Parsed
from webapp.metrics.models import Block, Pack, Series
from webapp.runs.models import Attempt

_IDS_A_QUERY = 500
_ROWS_A_QUERY = 50
_BLOCK = ("number", "first_step", "last_step", "after_step", "last_offset", "late", "rollup", "data")
_PACK = ("level", "number", "first_step", "last_step", "full", "data")


@dataclass(slots=True)
class Standing:
    """Where a series stands: the columns of Series that appending changes. Much cheaper to make than a model."""

    points: int
    first_step: int | None
    last_step: int | None
    last_time: float | None
    last_value: float | None
    last_kind: int
    last_offset: int
    blocks_written: int
    sealed_max_step: int | None
    late_points: int
    tail: bytes
    pk: int


_COLUMNS = tuple(Standing.__annotations__)


def save(attempt: Attempt, parsed: Parsed) -> float | None:
    """Append points to their series. Returns the attempt's last reward from before them, if the piece has rewards."""
    if not parsed.columns:
        return None
    lines = np.zeros(len(parsed.steps), POINT)
    lines["step"], lines["time"], lines["offset"] = parsed.steps, parsed.times, parsed.offsets
    standings = _standings(attempt, list(parsed.columns))
    last_reward = standings["reward"].last_value if "reward" in standings else None
    blocks: list[tuple[Any, ...]] = []
    grown: list[tuple[list[Standing], int, np.ndarray]] = []
    for names in _together(parsed.columns, standings):
        several = [standings[name] for name in names]
        written = several[0].blocks_written
        columns = [parsed.columns[name] for name in names]
        values = np.stack([column.values for column in columns])
        appended = appending.append(several, lines[columns[0].lines], values)
        if appended.rows.size:
            grown.append((several, written, appended.rows))
        for standing, own in zip(several, appended.blocks, strict=True):
            blocks += [(standing.pk, *itemgetter(*_BLOCK)(block)) for block in own]
    _insert(Block, ("series_id", *_BLOCK), blocks)
    _save_packs(grown)
    changed = ", ".join(f"{_quoted(column)}=%s" for column in _COLUMNS[:-1])
    execute_many(
        f"UPDATE {Series._meta.db_table} SET {changed} WHERE id=%s", map(attrgetter(*_COLUMNS), standings.values())
    )
    return last_reward


def execute_many(statement: str, rows: Any) -> None:
    """Run a statement for each of the rows (an iterable of sequences), in the connection's transaction."""
    if connection.vendor == "postgresql":
        # Django's cursors write values into the statement's text, which doubles blobs and is parsed anew for each row.
        assert isinstance(connection.connection, psycopg.Connection)
        with psycopg.Cursor(connection.connection) as plain:
            plain.executemany(statement.replace("%s", "%b"), rows)
        return
    with connection.cursor() as cursor:
        cursor.executemany(statement, rows)


def _quoted(column: str) -> str:
    return f'"{column}"'  # "full" is a word of SQL


def _insert(
    model: type[Block] | type[Pack], columns: Sequence[str], rows: Sequence[Sequence[Any]], more: str = ""
) -> None:
    if rows:
        places = ", ".join(["%s"] * len(columns))
        execute_many(
            f"INSERT INTO {model._meta.db_table} ({', '.join(map(_quoted, columns))}) VALUES ({places}) {more}", rows
        )


def _standings(attempt: Attempt, names: Sequence[str]) -> dict[str, Standing]:
    """Where the attempt's series of these names stand; missing ones are made."""
    found: dict[str, Standing] = {}
    for start in range(0, len(names), _IDS_A_QUERY):
        own = Series.objects.filter(attempt=attempt, name__in=names[start : start + _IDS_A_QUERY])
        found |= {name: Standing(*columns) for name, *columns in own.values_list("name", *_COLUMNS)}
    missing = [Series(run_id=attempt.run_id, attempt=attempt, name=name) for name in names if name not in found]
    Series.objects.bulk_create(missing, batch_size=_ROWS_A_QUERY)
    for series in missing:
        found[series.name] = Standing(*(getattr(series, column) for column in _COLUMNS))
    return found


def _together(columns: Mapping[str, Column], standings: Mapping[str, Standing]) -> Iterable[list[str]]:
    """Names that report on the same lines and whose tails do too, as those of a trainer's steps do: one piece of work."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, column in columns.items():
        groups.setdefault((id(column.lines), *appending.place(standings[name])), []).append(name)
    return groups.values()


def _save_packs(grown: Sequence[tuple[list[Standing], int, np.ndarray]]) -> None:
    """Save rollups over new blocks: (series, blocks each had before, rows of the shape (series, blocks))."""
    ids = [standing.pk for several, _, _ in grown for standing in several]
    held: dict[tuple[int, int], np.ndarray] = {}
    for start in range(0, len(ids), _IDS_A_QUERY):
        found = Pack.objects.filter(series__in=ids[start : start + _IDS_A_QUERY], full=False)
        for series, level, data in found.values_list("series_id", "level", "data"):
            held[series, level] = np.frombuffer(bytes(data), STORED_ROW)
    packs = []
    for several, written, rows in grown:
        levels = [level for series, level in held if series == several[0].pk]
        open_packs = {level: np.stack([held[standing.pk, level] for standing in several]) for level in levels}
        for level, number, changed in appending.roll_up(written, rows, open_packs):
            for standing, own in zip(several, changed, strict=True):
                packs.append((standing.pk, *itemgetter(*_PACK)(appending.pack_columns(level, number, own))))
    updates = ", ".join(f"{_quoted(column)}=excluded.{_quoted(column)}" for column in _PACK[2:])
    more = f"ON CONFLICT (series_id, level, number) DO UPDATE SET {updates}"
    _insert(Pack, ("series_id", *_PACK), packs, more)
