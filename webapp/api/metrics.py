"""Metrics of a run: names, curves for charts, what is new since, and complete exports."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import orjson
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from ninja import Query, Router

from webapp.api.auth import get_run
from webapp.api.errors import Invalid
from webapp.api.schemas import Detail
from webapp.metrics import charts, export
from webapp.metrics.lines import MAX_NAME

router = Router(tags=["metrics"])
MAX_METRICS = 100


@router.get("/runs/{uuid:run_id}/metrics", response={200: list[dict[str, Any]], 404: Detail})
def names(request: HttpRequest, run_id: UUID) -> list[dict[str, Any]]:
    """Every metric of the run: name, stage, unit, help, number of points, last step and value."""
    return charts.catalog(get_run(run_id))


@router.get("/runs/{uuid:run_id}/chart", response={200: dict[str, Any], 404: Detail, 422: Detail})
def chart(
    request: HttpRequest, run_id: UUID, metric: Annotated[list[str], Query()], axis: charts.Axis = "step",
    low: Annotated[float | None, Query(alias="from", allow_inf_nan=False)] = None,
    high: Annotated[float | None, Query(alias="to", allow_inf_nan=False)] = None,
    buckets: Annotated[int, Query(ge=10, le=charts.MAX_BUCKETS)] = charts.MAX_BUCKETS, after: str = "",
) -> HttpResponse:  # fmt: skip
    """Curves of some metrics (repeat `metric`) in at most `buckets` rows each, with lowest and highest value in each row.

    Each series has columns x, step, y and, where a row stands for several points, low, high and count; `odd` lists rows that
    hold nan, inf or -inf; `attempt` is null for the run's own curve and a number for what a later attempt superseded.
    With `after`, the `cursor` of an earlier answer: only what is new, or `reset` when the curves must be asked for anew.
    """
    if not 0 < len(metric) <= MAX_METRICS:
        raise Invalid(f"Found {len(metric)} metrics; 1 to {MAX_METRICS} are allowed in a request.")
    if any(not 0 < len(name) <= MAX_NAME for name in metric):
        raise Invalid(f"A metric's name has 1 to {MAX_NAME} characters.")
    run = get_run(run_id)
    try:
        answer = (
            charts.delta(run, metric, axis, after) if after else charts.chart(run, metric, axis, low, high, buckets)
        )
    except charts.BadCursor as error:
        raise Invalid(str(error)) from error
    return HttpResponse(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), content_type="application/json")


@router.get("/runs/{uuid:run_id}/metrics/export", response={200: None, 404: Detail, 422: Detail})
def export_(
    request: HttpRequest, run_id: UUID, metric: Annotated[list[str], Query()] = [], format: export.Format = "csv",  # noqa: B006
) -> StreamingHttpResponse:  # fmt: skip
    """Every point of the run, or of some metrics: never sampled. Columns: metric, attempt, step, time, value, superseded.

    Metrics that the run did not report are left out; 404 when it reported none of them.
    """
    run = get_run(run_id)
    series = export.series_of(run, metric)
    if metric and not series:
        raise Http404(f"The run has no points of {', '.join(metric)}.")
    return export.response(run, series, format)
