"""What somebody with a link sees: one run's charts and settings, or one report. No account, and nothing else of the studio."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, cast, get_args
from uuid import UUID

import orjson
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe
from pydantic import BaseModel, Field, ValidationError

from webapp.metrics import charts, export
from webapp.metrics.lines import MAX_NAME
from webapp.metrics.overview import charts_of
from webapp.reports import rendering
from webapp.runs.models import Run
from webapp.runs.problems import from_pydantic
from webapp.sharing.models import ShareLink

MAX_METRICS = 100
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class ChartQuery(BaseModel):
    """As GET /api/runs/<id>/chart takes it."""

    metric: list[Name] = Field(min_length=1, max_length=MAX_METRICS)
    axis: charts.Axis = "step"
    low: float | None = Field(None, alias="from", allow_inf_nan=False)
    high: float | None = Field(None, alias="to", allow_inf_nan=False)
    buckets: int = Field(charts.MAX_BUCKETS, ge=10, le=charts.MAX_BUCKETS)
    after: str = ""


def _public(view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Lets in who has a live link. Nothing is kept by browsers between, indexed, or told to other sites."""

    @login_not_required
    @require_safe
    @wraps(view)
    def guarded(request: HttpRequest, token: str, **kwargs: Any) -> HttpResponseBase:
        link = ShareLink.live(token)
        response = _gone(request) if link is None else view(request, link, token, **kwargs)
        response.headers["Cache-Control"] = "private, no-store"
        response.headers["X-Robots-Tag"] = "noindex"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    return guarded


def _gone(request: HttpRequest) -> HttpResponse:
    """The same for links that ended, were revoked, or never were."""
    return render(request, "sharing/gone.html", status=404)


@_public
def show(request: HttpRequest, link: ShareLink, token: str) -> HttpResponse:
    link.note_opened()
    if link.report is not None:
        return _report(request, link, token)
    assert link.run is not None
    run = link.run
    spec = run.run_spec().model_copy(update={"secrets": []})
    context = {
        "run": run, "link": link, "overview": charts_of(run.spec), "yaml": spec.to_yaml(), "max_steps": spec.training.max_steps,
        "data_url": _data_url(token, run),
    }  # fmt: skip
    return render(request, "sharing/shared_run.html", context)


def _report(request: HttpRequest, link: ShareLink, token: str) -> HttpResponse:
    assert link.report is not None
    allowed = {run.pk for run in link.runs()}
    rendered = rendering.render(
        link.report.text, lambda run: rendering.Place(_data_url(token, run)) if run.pk in allowed else None
    )
    return render(request, "sharing/shared_report.html", {"report": link.report, "link": link, "rendered": rendered})


def _data_url(token: str, run: Run) -> str:
    return reverse("shared:chart", args=[token, run.pk])


def _run(link: ShareLink, run_id: UUID) -> Run:
    """Raises Http404 for runs that the link does not show."""
    found = next((run for run in link.runs() if run.pk == run_id), None)
    if found is None:
        raise Http404("This link does not show that run.")
    return found


@_public
def chart(request: HttpRequest, link: ShareLink, token: str, run_id: UUID) -> HttpResponse:
    """Curves, as the API gives them; without the run's events, whose texts are for people with an account."""
    run = _run(link, run_id)
    query = {name: value for name in ("axis", "from", "to", "buckets", "after") if (value := request.GET.get(name))}
    try:
        wanted = ChartQuery.model_validate({**query, "metric": request.GET.getlist("metric")})
        if wanted.after:
            answer = charts.delta(run, wanted.metric, wanted.axis, wanted.after)
        else:
            answer = charts.chart(run, wanted.metric, wanted.axis, wanted.low, wanted.high, wanted.buckets)
    except ValidationError as error:
        problem = from_pydantic(error)[0]
        return JsonResponse({"detail": f"{problem.field}: {problem.message}"}, status=422)
    except charts.BadCursor as error:
        return JsonResponse({"detail": str(error)}, status=422)
    answer["events"] = []
    return HttpResponse(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), content_type="application/json")


@_public
def metrics(request: HttpRequest, link: ShareLink, token: str, run_id: UUID) -> HttpResponse:
    found = charts.catalog(_run(link, run_id))
    return HttpResponse(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY), content_type="application/json")


@_public
def points(request: HttpRequest, link: ShareLink, token: str, run_id: UUID) -> HttpResponseBase:
    """Every point, as the chart's CSV button asks for it."""
    run, kind = _run(link, run_id), request.GET.get("format", "csv")
    if kind not in get_args(export.Format):
        return JsonResponse({"detail": f"format is one of {', '.join(get_args(export.Format))}."}, status=422)
    series = export.series_of(run, request.GET.getlist("metric"))
    return export.response(run, series, cast(export.Format, kind))
