"""How well the runs of a sweep did, for its table and its plot."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.core.cache import cache

from webapp.metrics.models import PointKind, Series
from webapp.metrics.zoom import read_rows
from webapp.runs.models import LIVE, Run
from webapp.sweeps.models import Sweep

ROWS = 256
KEPT_S = 3600


@dataclass
class Result:
    """One run of a sweep. `final` is the newest value of the sweep's metric, `best` the best of all steps; None: none yet."""

    run: Run
    place: dict[str, Any]
    number: int
    final: float | None = None
    best: float | None = None
    leads: bool = False


@dataclass
class Results:
    """All runs, in the order of the trials. `paths` are the axes, `states` counts the runs in each state."""

    sweep: Sweep
    paths: list[str]
    rows: list[Result]
    states: dict[str, int]

    @property
    def live(self) -> int:
        return sum(count for state, count in self.states.items() if state in LIVE)

    @property
    def leader(self) -> Result | None:
        return next((row for row in self.rows if row.leads), None)


def results_of(sweep: Sweep) -> Results:
    """Two queries, and the points of runs that reported something new since they were last looked at."""
    trials = list(sweep.trials.select_related("run", "run__owner").defer("run__spec"))
    rows = [Result(trial.run, trial.place, trial.number) for trial in trials]
    found: dict[Any, list[Series]] = {}
    wanted = Series.objects.filter(run__in=[row.run.pk for row in rows], name=sweep.metric, points__gt=0)
    for series in wanted.select_related("attempt").order_by("attempt__number"):
        found.setdefault(series.run_id, []).append(series)
    better = max if sweep.goal == Sweep.Goal.MAX else min
    for row in rows:
        parts = found.get(row.run.pk, [])
        if parts and parts[-1].last_kind == PointKind.FINITE:
            row.final = parts[-1].last_value
        extremes = [value for part in parts if (value := _extreme(part, sweep.goal)) is not None]
        row.best = better(extremes) if extremes else None
    scored = [row for row in rows if row.best is not None]
    if scored:
        better(scored, key=lambda row: row.best or 0.0).leads = True
    return Results(sweep, list(sweep.axes), rows, dict(Counter(row.run.state for row in rows)))


def _extreme(series: Series, goal: str) -> float | None:
    """The largest or smallest finite value of a series; remembered until it has more points."""
    key = f"extreme:{goal}:{series.pk}:{series.points}"
    found = cache.get(key)
    if found is None:
        rows = read_rows(series, None, None, None, ROWS)
        side = rows["high"] if goal == Sweep.Goal.MAX else rows["low"]
        side = side[np.isfinite(side)]
        found = (float(side.max() if goal == Sweep.Goal.MAX else side.min()),) if len(side) else ()
        cache.set(key, found, KEPT_S)
    return found[0] if found else None


def sorted_rows(results: Results, key: str) -> list[Result]:
    """Rows by number, state, final, best or the path of an axis; a minus turns it round. Runs without a value come last."""
    name = key.removeprefix("-")

    def value(row: Result) -> Any:
        if name in ("number", "final", "best"):
            return getattr(row, name)
        return row.run.state if name == "state" else row.place.get(name)

    known = [row for row in results.rows if _sortable(value(row))]
    other = [row for row in results.rows if not _sortable(value(row))]
    numbers = all(isinstance(value(row), int | float) for row in known)
    known.sort(key=lambda row: value(row) if numbers else str(value(row)), reverse=key.startswith("-"))
    return known + other


def _sortable(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))
