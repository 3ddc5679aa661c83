"""The audit log as a page and as a file. For admins, as accounts/routes.py says."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import orjson
from django import forms
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from webapp.audit import log
from webapp.audit.models import Entry

A_PAGE = 100
COLUMNS = ("id", "at", "actor_name", "action", "target", "target_id", "text", "address", "via")


class FilterForm(forms.Form):
    """The query of the page."""

    actor = forms.CharField(required=False, max_length=150)
    action = forms.CharField(required=False, max_length=60)
    search = forms.CharField(required=False, max_length=200)
    since = forms.DateField(required=False)
    until = forms.DateField(required=False)

    @property
    def wanted(self) -> log.Filter:
        """What was asked for, without the fields that can't be understood."""
        known = {name: value for name, value in self.cleaned_data.items() if value}
        return log.Filter(**known)


@require_safe
def entries(request: HttpRequest) -> HttpResponse:
    form = FilterForm(request.GET)
    valid = form.is_valid()
    page = Paginator(log.find(form.wanted), A_PAGE).get_page(request.GET.get("page"))
    names = Entry.objects.order_by().values_list
    context = {
        "page": page, "wanted": form.wanted, "form": form, "filtered": form.wanted != log.Filter(),
        "actors": sorted(filter(None, names("actor_name", flat=True).distinct())),
        "actions": sorted(names("action", flat=True).distinct()),
    }  # fmt: skip
    return render(request, "audit/list.html", context, status=200 if valid else 400)


@require_safe
def export(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """Every matching entry, the oldest first, as CSV or as JSON lines (`format=jsonl`)."""
    form = FilterForm(request.GET)
    if not form.is_valid():
        field, problems = next(iter(form.errors.items()))
        text = f"{field}: {problems[0]} Days are written as 2026-11-30."
        return HttpResponse(text, status=400, content_type="text/plain; charset=utf-8")
    found = log.find(form.wanted).order_by("id")
    as_json = request.GET.get("format") == "jsonl"
    lines, kind = (_json_lines(found), "jsonl") if as_json else (_csv_lines(found), "csv")
    response = StreamingHttpResponse(lines, content_type="application/jsonl" if as_json else "text/csv; charset=utf-8")
    response.headers["Content-Disposition"] = f'attachment; filename="audit.{kind}"'
    return response


def _rows(found: QuerySet[Entry]) -> Iterator[dict[str, object]]:
    for row in found.values(*COLUMNS).iterator(chunk_size=1000):
        yield {**row, "at": row["at"].isoformat()}


def _json_lines(found: QuerySet[Entry]) -> Iterator[bytes]:
    for row in _rows(found):
        yield orjson.dumps(row) + b"\n"


def _csv_lines(found: QuerySet[Entry]) -> Iterator[str]:
    yield ",".join(COLUMNS) + "\r\n"
    for row in _rows(found):
        buffer = io.StringIO()
        csv.writer(buffer).writerow(_harmless(value) for value in row.values())
        yield buffer.getvalue()


def _harmless(value: object) -> object:
    """A text that a spreadsheet would take for a formula, made one that it does not."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
