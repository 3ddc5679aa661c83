"""Several runs over each other: their curves, their latest numbers, and the settings in which they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from webapp.metrics import export
from webapp.metrics.charts import describe_metric
from webapp.metrics.models import Series
from webapp.metrics.overview import evaluates, reward_metrics
from webapp.runs import forms
from webapp.runs.models import Run

METRICS = (
    "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "entropy", "kl", "sampling/mismatch_kl", "loss",
    "sample/staleness_mean", "perf/forwarded_tok_s_wall_clock", "rollout/generated_tok_s", "perf/step_s", "perf/rollout_wait_s",
)  # fmt: skip
"""Charts of a comparison that names no metric; evaluations and reward functions of the runs come after the first."""
PICKABLE = 200
"""Newest runs that are offered for adding."""
NAMES = 2000
"""Metric names that are offered for adding."""


@require_safe
def compare(request: HttpRequest) -> HttpResponse:
    """The page. `run` and `metric` may be repeated, `group` is a setting's path, `all=1` shows equal settings too."""
    runs = _runs(request)
    every = settings_of([run.spec for run in runs])
    differing = [row for row in every if row["differs"]]
    paths = [row["path"] for row in differing if row["path"] not in ("name", "notes")]
    group = request.GET.get("group", "")
    if group and group not in paths:
        there = ", ".join(paths) or "none"
        messages.error(request, f"The runs can't be grouped by {group!r:.80}; settings that differ are {there}.")
        group = ""
    label = next((row["values"] for row in every if row["path"] == group), [""] * len(runs))
    metrics = [name for name in dict.fromkeys(request.GET.getlist("metric")) if name]
    metrics = metrics or _metrics(runs)
    context = {
        "runs": runs, "rows": every if request.GET.get("all") == "1" else differing, "equal": len(every) - len(differing),
        "paths": paths, "group": group, "chosen": request.GET.getlist("metric"),
        "charts": [{"metric": name, **describe_metric(name), "json": json.dumps([name])} for name in metrics],
        "data": json.dumps([
            {"id": str(run.pk), "name": run.name, "group": f"{group} = {_text(value)}" if group else "", "live": run.is_live}
            for run, value in zip(runs, label, strict=True)
        ]),
        "names": _names(runs), "pickable": _pickable(runs),
    }  # fmt: skip
    return render(request, "runs/compare.html", context)


@require_safe
def compare_export(request: HttpRequest) -> HttpResponseBase:
    """Every point of a chart of the page: `run` and `metric` may be repeated, as there. 404 when there are none."""
    runs = _runs(request)
    metrics = [name for name in request.GET.getlist("metric") if name]
    if not metrics or not Series.objects.filter(run__in=runs, name__in=metrics, points__gt=0).exists():
        raise Http404("Name runs and a metric that at least one of them has reported.")
    return export.response_of_several(runs, metrics)


def _metrics(runs: Sequence[Run]) -> list[str]:
    """What a comparison of these runs shows unless told otherwise."""
    specs = [run.spec for run in runs]
    evaluation = ["eval/reward"] if any(map(evaluates, specs)) else []
    return [METRICS[0], *evaluation, *reward_metrics(specs), *METRICS[1:]]


def settings_of(specs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each setting of any spec, in the order of the form: path, the value in each spec, and whether they differ."""
    flat = [dict(forms.flatten(spec)) for spec in specs]
    paths = list(dict.fromkeys(path for values in flat for path in values))
    rows = []
    for path in paths:
        values = [values.get(path) for values in flat]
        rows.append({"path": path, "values": values, "differs": any(value != values[0] for value in values[1:])})
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _runs(request: HttpRequest) -> list[Run]:
    """The runs that the query names, in its order; what names none is said and left out."""
    wanted: list[UUID] = []
    for text in request.GET.getlist("run"):
        try:
            wanted.append(UUID(text))
        except ValueError:
            messages.error(request, f"{text!r:.60} is not the id of a run.")
    found = Run.objects.select_related("owner").in_bulk(list(dict.fromkeys(wanted)))
    if missing := [str(pk) for pk in dict.fromkeys(wanted) if pk not in found]:
        messages.error(request, f"There is no run {', '.join(missing)}; it may have been deleted.")
    return [found[pk] for pk in dict.fromkeys(wanted) if pk in found]


def _names(runs: Sequence[Run]) -> list[str]:
    names = Series.objects.filter(run__in=runs, points__gt=0).order_by("name").values_list("name", flat=True).distinct()
    return list(names[:NAMES])


def _pickable(runs: Sequence[Run]) -> list[Run]:
    others = Run.objects.filter(archived=False).exclude(pk__in=[run.pk for run in runs]).exclude(state="draft")
    return list(others.only("name", "state", "created_at").order_by("-created_at")[:PICKABLE])
