"""Making and revoking share links, by people who may change what is shared. What a link shows is in public.py."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from webapp.accounts.permissions import Action, can, require, user_of
from webapp.audit import log
from webapp.reports import rendering
from webapp.reports.models import Report
from webapp.runs import page as run_page
from webapp.runs.models import Run
from webapp.sharing.models import ShareLink, may_share

LIFETIMES = {"1": "a day", "7": "a week", "30": "30 days", "90": "90 days"}


class ShareForm(forms.Form):
    days = forms.ChoiceField(choices=list(LIFETIMES.items()))
    note = forms.CharField(max_length=80, required=False)


@require_http_methods(["GET", "POST"])
def run(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """The links of a run; a POST makes one."""
    found = get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)
    address, problem = "", ""
    if request.method == "POST":
        require(user_of(request), Action.RUN, found)
        address, problem = _make(request, found)
    context = {
        "run": found, "tab": "sharing", "head": run_page.head(found, user_of(request)), "address": address,
        "problem": problem, "links": found.share_links.select_related("owner"), "lifetimes": LIFETIMES,
    }  # fmt: skip
    return _shown_once(render(request, "sharing/run.html", context, status=422 if problem else 200))


@require_http_methods(["GET", "POST"])
def report(request: HttpRequest, report_id: UUID) -> HttpResponse:
    """The links of a report; a POST makes one, unless its charts show runs that this person may not share."""
    found = get_object_or_404(Report.objects.select_related("owner"), pk=report_id)
    address, problem = "", ""
    if request.method == "POST":
        require(user_of(request), Action.RUN, found)
        foreign = [item for item in rendering.runs_in(found.text) if not may_share(user_of(request), item)]
        if foreign:
            names = ", ".join(f"{item.name} (of {item.owner.username})" for item in foreign[:5])
            problem = f"The report shows runs that you may not share: {names}. Their owners can, or take them out."
        else:
            address, problem = _make(request, found)
    context = {
        "report": found, "may_share": can(user_of(request), Action.RUN, found), "address": address, "problem": problem,
        "links": found.share_links.select_related("owner"), "lifetimes": LIFETIMES,
    }  # fmt: skip
    return _shown_once(render(request, "sharing/report.html", context, status=422 if problem else 200))


def _make(request: HttpRequest, thing: Run | Report) -> tuple[str, str]:
    """The address of a new link, or what is wrong."""
    form = ShareForm(request.POST)
    if not form.is_valid():
        return "", f"A link works for {', '.join(LIFETIMES)} days; found {request.POST.get('days', '')!r:.20}."
    with transaction.atomic():
        lifetime = timedelta(days=int(form.cleaned_data["days"]))
        link, token = ShareLink.create(thing, user_of(request), lifetime, form.cleaned_data["note"])
        text = f"Whoever has the link {link.prefix}… reads it without an account until {link.expires_at:%Y-%m-%d %H:%M} UTC."
        log.record(request.user, "share.created", text, link)
    return request.build_absolute_uri(reverse("shared:show", args=[token])), ""


def _shown_once(response: HttpResponse) -> HttpResponse:
    response.headers["Cache-Control"] = "no-store"
    return response


@require_POST
def revoke(request: HttpRequest, link_id: int) -> HttpResponse:
    """End a link. Its maker may, and who may change what it shares."""
    link = get_object_or_404(ShareLink.objects.select_related("run__owner", "report__owner", "owner"), pk=link_id)
    if link.owner != request.user:
        require(user_of(request), Action.RUN, link.thing)
    with transaction.atomic():
        if ShareLink.objects.filter(pk=link.pk, revoked_at=None).update(revoked_at=timezone.now()):
            log.record(request.user, "share.revoked", f"The link {link.prefix}… no longer works.", link)
    messages.success(request, f"The link {link.prefix}… no longer works.")
    if link.run_id:
        return redirect("sharing:run", link.run_id)
    return redirect("sharing:report", link.report_id)
