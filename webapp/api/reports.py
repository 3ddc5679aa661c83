"""Reports: Markdown with live charts."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.db import transaction
from django.http import Http404, HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status

from webapp.accounts.permissions import Action, require, user_of
from webapp.api.schemas import Detail, Problems, ReportIn, ReportOut, ReportRow
from webapp.audit import log
from webapp.reports import rendering
from webapp.reports.models import Report

router = Router(tags=["reports"])
ERRORS = {401: Detail, 403: Detail, 404: Detail, 422: Problems}


@router.get("/reports", response={200: list[ReportRow], 422: Detail})
def reports(
    request: HttpRequest, search: str = "", offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Any:  # fmt: skip
    """Reports, the one changed last first. Every word of `search` must be in the title."""
    found = Report.objects.select_related("owner").defer("text")
    for word in search.split()[:10]:
        found = found.filter(title__icontains=word)
    return [_as_row(request, report) for report in found[offset : offset + limit]]


@router.get("/reports/{uuid:report_id}", response={200: ReportOut, 404: Detail})
def report(request: HttpRequest, report_id: UUID) -> Any:
    return _as_out(request, _get(report_id))


@router.post("/reports", response={201: ReportOut, **ERRORS})
def create_report(request: HttpRequest, body: ReportIn) -> Status[Any]:
    """Store a report. A block ```` ```chart ```` with `runs:` and `metrics:` is a live chart on its page."""
    return Status(201, _as_out(request, _save(request, Report(owner=user_of(request)), body, "report.created")))


@router.put("/reports/{uuid:report_id}", response={200: ReportOut, **ERRORS})
def change_report(request: HttpRequest, report_id: UUID, body: ReportIn) -> Any:
    found = _get(report_id)
    require(user_of(request), Action.RUN, found)
    return _as_out(request, _save(request, found, body, "report.changed"))


@router.delete("/reports/{uuid:report_id}", response={204: None, **ERRORS})
def delete_report(request: HttpRequest, report_id: UUID) -> Status[None]:
    """Delete a report with its share links."""
    found = _get(report_id)
    require(user_of(request), Action.RUN, found)
    with transaction.atomic():
        log.record(user_of(request), "report.deleted", "Deleted, with its share links.", found)
        found.delete()
    return Status(204, None)


def _save(request: HttpRequest, report: Report, body: ReportIn, deed: str) -> Report:
    report.title, report.text = body.title, body.text
    with transaction.atomic():
        report.save()
        log.record(user_of(request), deed, f"{len(report.text):,} characters.", report)
    return report


def _get(report_id: UUID) -> Report:
    found = Report.objects.select_related("owner").filter(pk=report_id).first()
    if found is None:
        raise Http404(f"There is no report {report_id}.")
    return found


def _as_row(request: HttpRequest, report: Report) -> dict[str, Any]:
    columns = ("id", "title", "created_at", "changed_at")
    return {
        **{name: getattr(report, name) for name in columns}, "owner": report.owner.username,
        "url": request.build_absolute_uri(reverse("reports:detail", args=[report.pk])),
    }  # fmt: skip


def _as_out(request: HttpRequest, report: Report) -> dict[str, Any]:
    return {
        **_as_row(request, report), "text": report.text, "runs": [run.pk for run in rendering.runs_in(report.text)],
        "problems": rendering.render(report.text).problems,
    }  # fmt: skip
