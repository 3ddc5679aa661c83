"""Pages of reports: list, read, write with a preview, delete."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from webapp.accounts.permissions import Action, can, require, user_of
from webapp.audit import log
from webapp.reports import rendering
from webapp.reports.models import Report
from webapp.runs import queries
from webapp.runs.models import Run

A_PAGE = 50
MAX_TEXT = 200_000


class ReportForm(forms.ModelForm):
    text = forms.CharField(max_length=MAX_TEXT, strip=False, widget=forms.Textarea)

    class Meta:
        model = Report
        fields = ("title", "text")

    def clean_text(self) -> str:
        return self.cleaned_data["text"].replace("\r\n", "\n")


def _get_report(report_id: UUID) -> Report:
    return get_object_or_404(Report.objects.select_related("owner"), pk=report_id)


def _get_own_report(request: HttpRequest, report_id: UUID) -> Report:
    report = _get_report(report_id)
    require(user_of(request), Action.RUN, report)
    return report


@require_safe
def report_list(request: HttpRequest) -> HttpResponse:
    search = request.GET.get("search", "").strip()
    found = Report.objects.select_related("owner").defer("text")
    for word in search.split()[:10]:
        found = found.filter(title__icontains=word)
    page = Paginator(found, A_PAGE).get_page(request.GET.get("page"))
    return render(request, "reports/list.html", {"page": page, "search": search})


@require_safe
def detail(request: HttpRequest, report_id: UUID) -> HttpResponse:
    report = _get_report(report_id)
    links = [link for link in report.share_links.all() if link.is_live]
    context = {
        "report": report, "rendered": rendering.render(report.text), "may_change": can(user_of(request), Action.RUN, report),
        "links": links,
    }  # fmt: skip
    return render(request, "reports/detail.html", context)


@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """A report about the runs that `run` names, which may be repeated."""
    if request.method == "POST":
        return _save(request, Report(owner=user_of(request)), "report.created")
    runs = Run.objects.filter(pk__in=queries.run_ids(request.GET.getlist("run")))
    return _editor(request, ReportForm(initial={"text": rendering.template_for(list(runs[: rendering.MOST_RUNS]))}))


@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, report_id: UUID) -> HttpResponse:
    report = _get_own_report(request, report_id)
    if request.method == "POST":
        return _save(request, report, "report.changed")
    return _editor(request, ReportForm(instance=report), report)


def _save(request: HttpRequest, report: Report, deed: str) -> HttpResponse:
    form = ReportForm(request.POST, instance=report)
    if not form.is_valid():
        return _editor(request, form, None if report._state.adding else report, status=422)
    with transaction.atomic():
        saved = form.save()
        log.record(request.user, deed, f"{len(saved.text):,} characters.", saved)
    return redirect("reports:detail", saved.pk)


def _editor(request: HttpRequest, form: ReportForm, report: Report | None = None, *, status: int = 200) -> HttpResponse:
    text = str(form["text"].value() or "")
    context: dict[str, Any] = {"form": form, "report": report, "rendered": rendering.render(text[:MAX_TEXT])}
    return render(request, "reports/edit.html", context, status=status)


@require_POST
def preview(request: HttpRequest) -> HttpResponse:
    """What a text will look like; a fragment."""
    text = request.POST.get("text", "")[:MAX_TEXT]
    return render(request, "reports/body.html", {"rendered": rendering.render(text)})


@require_POST
def delete(request: HttpRequest, report_id: UUID) -> HttpResponse:
    report = _get_own_report(request, report_id)
    with transaction.atomic():
        log.record(request.user, "report.deleted", "Deleted, with its share links.", report)
        report.delete()
    messages.success(request, f"Deleted {report.title}.")
    return redirect("reports:list")
