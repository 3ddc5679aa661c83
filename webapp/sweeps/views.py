"""Pages of sweeps: list, form with preview, results."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from webapp.accounts.permissions import Action, can, require, user_of
from webapp.fragments import unless_seen
from webapp.runs import sweeps
from webapp.runs.models import Run
from webapp.runs.problems import Problem
from webapp.sweeps import forms, services
from webapp.sweeps.models import Sweep
from webapp.sweeps.results import Results, results_of, sorted_rows
from webapp.templatetags.offbeat import plural

A_PAGE = 50
BASES_SHOWN = 100
PREVIEWED = 60
EMPTY_ROWS = 2
METRICS = (
    "reward", "eval/reward", "eval/pass@1", "loss", "kl", "entropy", "perf/forwarded_tok_s_wall_clock", "perf/step_s",
)  # fmt: skip


def _get_sweep(sweep_id: UUID) -> Sweep:
    return get_object_or_404(Sweep.objects.select_related("owner", "base"), pk=sweep_id)


@require_safe
def sweep_list(request: HttpRequest) -> HttpResponse:
    found = Sweep.objects.select_related("owner", "base").annotate(runs=Count("trials")).order_by("-created_at")
    page = Paginator(found, A_PAGE).get_page(request.GET.get("page"))
    rows = [{"sweep": sweep, "results": results_of(sweep)} for sweep in page]
    return render(request, "sweeps/list.html", {"page": page, "rows": rows})


def _base(request: HttpRequest) -> Run | None:
    text = request.POST.get("base") or request.GET.get("from") or ""
    try:
        return Run.objects.filter(pk=UUID(text)).first()
    except ValueError:
        return None


@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """The form; a POST makes all runs, or says why it made none."""
    base = _base(request)
    if request.method != "POST":
        return _form(request, base, [forms.AxisRow(0), forms.AxisRow(1)], [])
    plan, problems = forms.read(request.POST)
    if base is None:
        problems = [Problem("base", "Choose the run whose settings the sweep begins with."), *problems]
    if base is not None and plan is not None:
        specs, places, problems = services.combine(base.run_spec(), plan)
        problems = problems or services.check(specs, user_of(request))
        if not problems:
            launch = request.POST.get("action") != "draft"
            sweep = services.create(base, plan, specs, places, user_of(request), launch=launch)
            what = "queued; they run as devices become free" if launch else "made as drafts"
            messages.success(request, f"{plural(len(specs), 'run')} {what}.")
            return redirect("sweeps:detail", sweep.pk)
    return _form(request, base, forms.axis_rows(request.POST), problems, status=422)


def _form(
    request: HttpRequest, base: Run | None, rows: list[forms.AxisRow], problems: list[Problem], *, status: int = 200
) -> HttpResponse:
    bases = Run.objects.filter(archived=False).only("name", "state", "created_at").order_by("-created_at")[:BASES_SHOWN]
    context = {
        "base": base, "bases": bases, "rows": rows, "problems": problems, "kinds": forms.KINDS, "metrics": METRICS,
        "paths": sweeps.sweepable(base.run_spec()) if base else [], "posted": request.POST, "most": sweeps.MAX_RUNS,
        "empty_row": forms.AxisRow("__index__"),
    }  # fmt: skip
    return render(request, "sweeps/form.html", context, status=status)


@require_POST
def preview(request: HttpRequest) -> HttpResponse:
    """The combinations of a form, or what is wrong with it; a fragment. Nothing is made."""
    base = _base(request)
    plan, problems = forms.read(request.POST)
    context: dict[str, Any] = {"problems": problems}
    if base is None:
        context["problems"] = [Problem("axes", "Choose the run whose settings the sweep begins with.")]
    elif plan is not None:
        specs, places, context["problems"] = services.combine(base.run_spec(), plan)
        # What the machine says, of the first only: somebody is typing.
        context["problems"] = context["problems"] or services.check(specs[:1], user_of(request))
        context |= {"paths": list(plan.axes), "count": len(places), "places": [list(place.values()) for place in
                    places[:PREVIEWED]], "more": max(0, len(places) - PREVIEWED)}  # fmt: skip
    return render(request, "sweeps/preview.html", context)


@require_safe
def detail(request: HttpRequest, sweep_id: UUID) -> HttpResponse:
    """The page. It asks again for `fragment=1`, and gets 204 while nothing has changed."""
    sweep = _get_sweep(sweep_id)
    results = results_of(sweep)
    sort = request.GET.get("sort") or ("-best" if sweep.goal == Sweep.Goal.MAX else "best")
    context = {
        "sweep": sweep, "results": results, "rows": [(row, list(row.place.values())) for row in sorted_rows(results, sort)],
        "sort": sort, "headings": _headings(results, sort), "plot": json.dumps(_plot(results)),
        "may_change": can(user_of(request), Action.RUN, sweep), "states": sorted(results.states.items()),
    }  # fmt: skip
    if request.GET.get("fragment"):
        return unless_seen(request, render_to_string("sweeps/results.html", context, request=request))
    return render(request, "sweeps/detail.html", context)


def _headings(results: Results, sort: str) -> list[dict[str, str]]:
    """Columns of the table with what a click sorts by."""
    names = {
        "number": "No.",
        "state": "State",
        **{path: path for path in results.paths},
        "final": "Final",
        "best": "Best",
    }
    return [
        {
            "title": title, "axis": "1" if key in results.paths else "", "sort": f"-{key}" if sort == key else key,
            "aria": {key: "ascending", f"-{key}": "descending"}.get(sort, ""),
        }
        for key, title in names.items()
    ]  # fmt: skip


def _plot(results: Results) -> dict[str, Any]:
    """What the parallel coordinates show: an axis for each swept setting, then the best value."""
    axes = results.sweep.axes
    return {
        "axes": [{"path": path, "log": bool(isinstance(axes[path], dict) and axes[path].get("log"))} for path in results.paths],
        "metric": results.sweep.metric, "goal": results.sweep.goal,
        "runs": [
            {"url": f"/runs/{row.run.pk}/", "name": row.run.name, "number": row.number, "state": row.run.state,
             "values": [row.place.get(path) for path in results.paths], "best": row.best, "leads": row.leads}
            for row in results.rows
        ],
    }  # fmt: skip


@require_POST
def stop(request: HttpRequest, sweep_id: UUID) -> HttpResponse:
    sweep = _get_sweep(sweep_id)
    require(user_of(request), Action.RUN, sweep)
    count = services.stop(sweep, user_of(request), save=request.POST.get("save") == "1")
    messages.success(request, f"Asked {plural(count, 'run')} to stop." if count else "No run of this sweep is live.")
    return redirect("sweeps:detail", sweep.pk)
