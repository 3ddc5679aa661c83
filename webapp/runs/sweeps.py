"""Sweeps: many runs from one spec, a value of each axis changed; all combinations, or a random choice of them."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from trainer_core.spec import RunSpec
from webapp.runs import forms
from webapp.runs.problems import Problem, from_pydantic

MAX_RUNS = 200
"""Runs that one sweep may make."""


def points(axes: Mapping[str, Sequence[Any]], count: int | None, seed: int) -> list[dict[str, Any]]:
    """Values of each axis for each run: the whole grid, or `count` different places of it.

    Raises ValueError with a sentence when that are none or too many.
    """
    total = math.prod(len(values) for values in axes.values()) if axes else 0
    wanted = total if count is None else min(count, total)
    if not 0 < wanted <= MAX_RUNS:
        raise ValueError(
            f"the axes make {total:,} runs; 1 to {MAX_RUNS} are allowed, and 'count' takes some of them by chance"
        )
    chosen = range(total) if wanted == total else sorted(random.Random(seed).sample(range(total), wanted))
    return [_place(axes, index) for index in chosen]


def specs(base: RunSpec, places: Sequence[Mapping[str, Any]]) -> tuple[list[RunSpec], list[Problem]]:
    """The spec of each run, named by what is special about it and tagged with the sweep; or what is wrong with them."""
    known = {path for path, _ in forms.leaves()} - {"name", "tags"}
    if unknown := sorted({path for place in places for path in place} - known):
        text = "There is no such setting to sweep; see the list of settings in the form."
        return [], [Problem(path, text) for path in unknown]
    tag = f"sweep-{uuid.uuid4().hex[:8]}"
    made, problems = [], []
    for place in places:
        data = base.model_dump(mode="json")
        for path, value in place.items():
            section, _, name = path.rpartition(".")
            (data[section] if section else data)[name] = value
        special = ", ".join(f"{path.rpartition('.')[2]}={value}" for path, value in place.items())
        data["name"] = f"{base.name[: max(0, 116 - len(special))]}: {special}"[:120]
        data["tags"] = [*base.tags, tag]
        try:
            made.append(RunSpec.model_validate(data))
        except ValidationError as error:
            problems += [Problem(item.field, f"{special}: {item.message}") for item in from_pydantic(error)]
    return made, problems


def _place(axes: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    """The combination of this number; the last axis moves first."""
    place = {}
    for path, values in reversed(list(axes.items())):
        index, at = divmod(index, len(values))
        place[path] = values[at]
    return dict(reversed(list(place.items())))
