"""Metrics of a run: names, curves for charts, what is new since, and complete exports."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import orjson
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import reverse
from ninja import Query, Router, Status
from pydantic import ValidationError

from webapp.accounts.permissions import user_of
from webapp.api.auth import get_own_run, get_run
from webapp.api.errors import Invalid
from webapp.api.openapi import STREAM
from webapp.api.schemas import Detail, Imported, ImportIn, Stored
from webapp.metrics import charts, export, history
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


@router.post("/imports", response={201: Imported, 422: Detail})
def import_(request: HttpRequest, payload: ImportIn) -> Status[dict[str, Any]]:
    """Make a run that was trained elsewhere and has ended; its points follow, as POST /runs/<id>/metrics."""
    try:
        run = history.create(user_of(request), **payload.dict())
    except ValidationError as error:
        raise Invalid(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from error
    return Status(201, {"id": run.pk, "url": reverse("runs:detail", args=[run.pk])})


@router.post("/runs/{uuid:run_id}/metrics", response={200: Stored, 403: Detail, 404: Detail, 409: Detail, 422: Detail})
def ingest(request: HttpRequest, run_id: UUID, offset: Annotated[int, Query(ge=0, le=2**62)]) -> dict[str, Any]:
    """Store lines of a spool (docs/metrics.md has the format), sent as the body, up to 2 MiB at a time.

    `offset` is the number of bytes sent before: it makes a batch one that can be repeated. One that is stored already changes
    nothing, and `offset` of the answer always says where to go on. Only for runs made by POST /imports: others report through
    their supervisor.
    """
    run = get_own_run(request, run_id)
    if len(request.body) > history.MAX_BODY:
        raise Invalid(f"The body has {len(request.body)} bytes; up to {history.MAX_BODY} are taken at a time.")
    return {"offset": history.add(run, offset, request.body)}


@router.get("/runs/{uuid:run_id}/metrics/export", response={200: None, 404: Detail, 422: Detail}, openapi_extra=STREAM)
def export_(
    request: HttpRequest, run_id: UUID, metric: Annotated[list[str], Query()] = [], format: export.Format = "csv",  # noqa: B006
) -> StreamingHttpResponse:  # fmt: skip
    """Every point of the run, or of some metrics: never sampled.

    Columns: metric, attempt, step, time, value, superseded, points. The last is 1, or how many points the value is the mean of,
    where retention has dropped them (/points/).

    Metrics that the run did not report are left out; 404 when it reported none of them.
    """
    run = get_run(run_id)
    series = export.series_of(run, metric)
    if metric and not series:
        raise Http404(f"The run has no points of {', '.join(metric)}.")
    return export.response(run, series, format)
