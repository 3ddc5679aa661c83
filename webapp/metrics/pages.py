"""The page of stored points: how much there is, what may be dropped and when, what was dropped."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from django import forms
from django.contrib import messages
from django.db import connection, transaction
from django.db.models import Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from webapp.accounts.models import User
from webapp.accounts.permissions import Action, can, require
from webapp.audit import log
from webapp.metrics import retention
from webapp.metrics.appending import BLOCK_POINTS
from webapp.metrics.models import Retention, Series
from webapp.runs.models import Event

RUNS_IN_PREVIEW = 200
_EVENTS = 20
_LONGEST_DAYS = 36_500


class RetentionForm(forms.ModelForm):
    """Two numbers of days; empty keeps for ever."""

    superseded_days = forms.IntegerField(required=False, min_value=1, max_value=_LONGEST_DAYS)
    ended_days = forms.IntegerField(required=False, min_value=1, max_value=_LONGEST_DAYS)

    class Meta:
        model = Retention
        fields = ("superseded_days", "ended_days")


@dataclass
class Preview:
    """What a setting would drop now: runs, at most so many points. `more`: not all runs were looked at."""

    runs: int
    points: int
    more: bool


@require_http_methods(["GET", "POST"])
def retention_page(request: HttpRequest) -> HttpResponse:
    """The setting. Posted with action=preview it says what these days would drop now, else it is saved."""
    assert isinstance(request.user, User)
    form = RetentionForm(request.POST if request.method == "POST" else None, instance=retention.setting())
    preview = None
    if request.method == "POST":
        require(request.user, Action.ADMIN)
        if form.is_valid() and request.POST.get("action") == "preview":
            preview = _preview(form.save(commit=False))
        elif form.is_valid():
            _save(form, request.user)
            messages.success(request, "Saved. What may be dropped is dropped within an hour, and each run says so.")
            return redirect("metrics:retention")
    totals = Series.objects.aggregate(points=Sum("points", default=0), dropped=Sum("dropped_points", default=0))
    context = {
        "form": form, "preview": preview, "totals": totals, "database_size": _database_size(), "policy": retention.setting(),
        "events": Event.objects.filter(name=retention.DROPPED).select_related("run").order_by("-id")[:_EVENTS],
        "may_change": can(request.user, Action.ADMIN),
    }  # fmt: skip
    return render(request, "metrics/retention.html", context, status=400 if form.errors else 200)


def _save(form: RetentionForm, user: User) -> None:
    with transaction.atomic():
        policy = form.save(commit=False)
        policy.changed_by = user
        policy.save()
        log.record(user, "retention.changed", f"Points are kept: {describe(policy)}.", name="retention")


def describe(policy: Retention) -> str:
    """The setting in words."""
    if policy.superseded_days is None and policy.ended_days is None:
        return "for ever"
    parts = []
    if policy.superseded_days is not None:
        parts.append(f"superseded ones for {policy.superseded_days} days after a run's end")
    if policy.ended_days is not None:
        parts.append(f"all single ones for {policy.ended_days} days after a run's end")
    return ", ".join(parts)


def _preview(policy: Retention) -> Preview:
    found = list(islice(retention.droppable(policy, timezone.now()), RUNS_IN_PREVIEW + 1))
    shown = found[:RUNS_IN_PREVIEW]
    blocks = sum(own.count() for item in shown for _, own in item.blocks)
    return Preview(len(shown), blocks * BLOCK_POINTS, len(found) > len(shown))


def _database_size() -> int:
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
        else:
            cursor.execute("SELECT pg_database_size(current_database())")
        return int(cursor.fetchone()[0])
