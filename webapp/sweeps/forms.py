"""The form of a sweep: which settings vary, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_origin

import yaml
from django import forms as django_forms

from webapp.runs import forms, sweeps
from webapp.runs.problems import Problem
from webapp.sweeps.models import Sweep
from webapp.sweeps.services import Plan

KINDS = {"list": "values", "range": "range", "log": "log range"}


@dataclass
class AxisRow:
    """One axis as it was typed."""

    index: int | str
    path: str = ""
    kind: str = "list"
    values: str = ""
    low: str = ""
    high: str = ""
    points: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.path or self.values or self.low or self.high)


class SweepForm(django_forms.Form):
    """Everything but the axes."""

    name = django_forms.CharField(max_length=120, required=False)
    method = django_forms.ChoiceField(choices=Sweep.Method.choices, required=False)
    count = django_forms.IntegerField(min_value=1, max_value=sweeps.MAX_RUNS, required=False)
    seed = django_forms.IntegerField(min_value=0, max_value=2**31, required=False)
    metric = django_forms.CharField(max_length=250, required=False)
    goal = django_forms.ChoiceField(choices=Sweep.Goal.choices, required=False)


def axis_rows(post: Mapping[str, str]) -> list[AxisRow]:
    """The rows of a posted form, in their order."""
    numbers = sorted(
        {int(key.split(".")[1]) for key in post if key.startswith("axis.") and key.split(".")[1].isdigit()}
    )
    return [
        AxisRow(place, **{name: post.get(f"axis.{number}.{name}", "").strip() for name in
                          ("path", "kind", "values", "low", "high", "points")})
        for place, number in enumerate(numbers[: 2 * sweeps.MAX_AXES])
    ]  # fmt: skip


def read(post: Mapping[str, str]) -> tuple[Plan | None, list[Problem]]:
    """What a posted form asks for, or what can't be understood."""
    form = SweepForm(post)
    problems = [Problem(name, f"{name}: {errors[0]}") for name, errors in form.errors.items()]
    axes: dict[str, sweeps.Axis] = {}
    for row in axis_rows(post):
        if row.is_empty:
            continue
        try:
            if row.path in axes:
                raise ValueError("is there twice; put all its values into one row")
            axes[row.path] = _axis(row)
        except ValueError as error:
            problems.append(Problem(row.path, f"{row.path or 'A row without a setting'}: {error}."))
    if not axes and not problems:
        problems.append(Problem("axes", "Nothing varies yet: choose a setting, and give it values or a range."))
    if problems:
        return None, problems
    data = form.cleaned_data
    count = data["count"] if data["method"] == Sweep.Method.RANDOM else None
    if count is None and data["method"] == Sweep.Method.RANDOM:
        return None, [Problem("count", f"Say how many runs are to be drawn, 1 to {sweeps.MAX_RUNS}.")]
    return Plan(axes, count, data["seed"] or 0, data["name"], data["metric"] or "reward", data["goal"] or "max"), []


def _axis(row: AxisRow) -> sweeps.Axis:
    if row.kind not in KINDS:
        raise ValueError(f"is of kind {row.kind!r:.40}; there are {', '.join(KINDS)}")
    if row.kind == "list":
        return values(row.path, row.values)
    low, high = _number(row.low, "from"), _number(row.high, "to")
    points = int(_number(row.points, "points")) if row.points else None
    return sweeps.Range(low, high, row.kind == "log", points, sweeps.is_whole(row.path))


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"'{what}' needs a number; found {text!r:.40}") from None


def values(path: str, text: str) -> list[Any]:
    """Values that are separated by commas, or one a line; generator options are YAML objects in a row.

    "none" stands for an empty setting. Raises ValueError with a sentence.
    """
    if _is_mapping(path):
        try:
            found = yaml.safe_load(f"[{text}]")
        except yaml.YAMLError:
            found = None
        if not found or not all(isinstance(item, dict) for item in found):
            raise ValueError("needs YAML objects with commas between them, such as {max_digits: 1}, {max_digits: 2}")
        return found
    parts = [part.strip() for part in (text.splitlines() if "\n" in text else text.split(","))]
    typed = [part for part in parts if part]
    if not typed:
        raise ValueError("has no values; give some with commas between them")
    empty = None if path in _may_be_empty() or path.endswith(".version") else "none"
    return list(dict.fromkeys(empty if part.lower() == "none" else part for part in typed))


def _is_mapping(path: str) -> bool:
    """Whether a setting holds names and values, as generator options do."""
    return any(known == path and get_origin(info.annotation) is dict for known, info in forms.leaves())


def _may_be_empty() -> set[str]:
    return {path for path, info in forms.leaves() if type(None) in getattr(info.annotation, "__args__", ())}
