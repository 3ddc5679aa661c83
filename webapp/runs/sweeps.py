"""Sweeps: many runs from one spec, values of some settings changed; all combinations, or a random choice of them.

An axis is a list of values, or a Range. Nothing here touches the database.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from trainer_core.spec import RunSpec
from webapp.runs import forms
from webapp.runs.problems import Problem, from_pydantic

MAX_RUNS = 200
"""Runs that one sweep may make."""
MAX_AXES = 8
NOT_SWEPT = ("name", "tags", "notes", "secrets")
"""Settings that say nothing about training."""
_DIGITS = 4
"""Significant digits of a drawn number; more would only make names long."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included, evenly spaced or drawn; on a log scale, by their logarithms.

    `points` is how many a grid takes; None leaves the range to be drawn from. `whole` rounds to integers.
    Raises ValueError with a sentence.
    """

    low: float
    high: float
    log: bool = False
    points: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"a range goes from a smaller to a larger number; found {self.low:g} to {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"a log range begins above 0; found {self.low:g}")
        if self.points is not None and not 2 <= self.points <= MAX_RUNS:
            raise ValueError(f"a range takes 2 to {MAX_RUNS} points; found {self.points}")

    def values(self) -> list[float]:
        """The points of a grid, each once. Raises ValueError when there is no number of them."""
        if self.points is None:
            raise ValueError("a grid needs the number of points of each range; or draw by chance instead")
        found = [self._at(index / (self.points - 1)) for index in range(self.points)]
        return list(dict.fromkeys(found))

    def draw(self, chance: random.Random) -> float:
        return self._at(chance.random())

    def _at(self, share: float) -> float:
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        if self.whole:
            return round(value)
        return min(self.high, max(self.low, float(f"{value:.{_DIGITS}g}")))


Axis = Sequence[Any] | Range


def sweepable(spec: RunSpec) -> list[str]:
    """Dotted paths of the settings that a sweep of this spec may vary, rewards by their place: rewards.0.weight."""
    paths = [path for path, _ in forms.leaves() if path not in NOT_SWEPT]
    return paths + [f"rewards.{at}.{name}" for at in range(len(spec.rewards)) for name in ("name", "version", "weight")]


def is_whole(path: str) -> bool:
    """Whether a setting takes integers only."""
    info = dict(forms.leaves()).get(path)
    kinds = (info.annotation, *get_args(info.annotation)) if info is not None else ()
    return path.endswith(".version") or (int in kinds and float not in kinds)


def points(axes: Mapping[str, Axis], count: int | None, seed: int) -> list[dict[str, Any]]:
    """Values of each axis for each run: the whole grid, or `count` different places by chance.

    Places of a grid are chosen from it; with a range that has no points, each axis is drawn on its own. Raises ValueError
    with a sentence when that are none or too many.
    """
    if len(axes) > MAX_AXES:
        raise ValueError(f"a sweep has up to {MAX_AXES} axes; found {len(axes)}")
    open_ended = any(isinstance(axis, Range) and axis.points is None for axis in axes.values())
    if count is not None and open_ended:
        return _drawn(axes, count, random.Random(seed))
    values = {path: axis.values() if isinstance(axis, Range) else axis for path, axis in axes.items()}
    total = math.prod(len(found) for found in values.values()) if values else 0
    wanted = total if count is None else min(count, total)
    if not 0 < wanted <= MAX_RUNS:
        raise ValueError(
            f"the axes make {total:,} runs; 1 to {MAX_RUNS} are allowed, and 'count' takes some of them by chance"
        )
    chosen = range(total) if wanted == total else sorted(random.Random(seed).sample(range(total), wanted))
    return [_place(values, index) for index in chosen]


def _drawn(axes: Mapping[str, Axis], count: int, chance: random.Random) -> list[dict[str, Any]]:
    if not 0 < count <= MAX_RUNS:
        raise ValueError(f"{count:,} runs are asked for; 1 to {MAX_RUNS} are allowed")
    if empty := [path for path, axis in axes.items() if not isinstance(axis, Range) and not axis]:
        raise ValueError(f"{empty[0]} has no value, so the axes make 0 runs; 1 to {MAX_RUNS} are allowed")
    places: dict[str, dict[str, Any]] = {}
    for _ in range(count * 50):
        place = {
            path: axis.draw(chance) if isinstance(axis, Range) else chance.choice(list(axis))
            for path, axis in axes.items()
        }
        places.setdefault(repr(place), place)
        if len(places) == count:
            break
    return list(places.values())


def specs(base: RunSpec, places: Sequence[Mapping[str, Any]]) -> tuple[list[RunSpec], list[Problem]]:
    """The spec of each run, named by what is special about it and tagged with the sweep; or what is wrong with them."""
    known = set(sweepable(base))
    if unknown := sorted({path for place in places for path in place} - known):
        text = "There is no such setting to sweep; see the list of settings in the form."
        return [], [Problem(path, text) for path in unknown]
    tag = f"sweep-{uuid.uuid4().hex[:8]}"
    made: list[RunSpec] = []
    problems: dict[tuple[str, str], Problem] = {}
    for place in places:
        data = base.model_dump(mode="json")
        for path, value in place.items():
            holder, key = _holder(data, path)
            holder[key] = value
        special = ", ".join(f"{_short(path)}={value}" for path, value in place.items())
        data["name"] = f"{base.name[: max(0, 116 - len(special))]}: {special}"[:120]
        data["tags"] = [*base.tags, tag]
        try:
            made.append(RunSpec.model_validate(data))
        except ValidationError as error:
            for item in from_pydantic(error):
                # One wrong value of one axis is in many places, and is said once.
                what = f"{_short(item.field)}={place[item.field]}" if item.field in place else special
                problems.setdefault((item.field, what), Problem(item.field, f"{what}: {item.message}"))
    return made, list(problems.values())


def value_at(spec: Mapping[str, Any], path: str) -> Any:
    """The value that a spec (as JSON) has at a dotted path."""
    holder, key = _holder(spec, path)
    return holder[key]


def _holder(data: Any, path: str) -> tuple[Any, Any]:
    """The section or list of a spec that holds the value at a path, and its key there."""
    *sections, last = path.split(".")
    for name in sections:
        data = data[int(name)] if isinstance(data, list) else data[name]
    return data, int(last) if isinstance(data, list) else last


def _short(path: str) -> str:
    return path if path.startswith("rewards.") else path.rpartition(".")[2]


def _place(axes: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    """The combination of this number; the last axis moves first."""
    place = {}
    for path, values in reversed(list(axes.items())):
        index, at = divmod(index, len(values))
        place[path] = values[at]
    return dict(reversed(list(place.items())))
