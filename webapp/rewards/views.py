"""Reward functions: the library, writing and versions. Trying them out is in testing.py."""

from __future__ import annotations

import difflib
from typing import Any

from django.contrib import messages
from django.db.models import Count, Max
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from trainer_core.rewards import BUILTINS
from webapp.accounts.permissions import Action, can, require, user_of
from webapp.audit import log
from webapp.rewards import services
from webapp.rewards.forms import STARTER, FunctionForm, TryForm, VersionForm
from webapp.rewards.models import RewardFunction, RewardVersion
from webapp.rewards.testing import run_test


def _get_function(name: str) -> RewardFunction:
    return get_object_or_404(RewardFunction.objects.select_related("owner"), name=name)


def _get_own_function(request: HttpRequest, name: str) -> RewardFunction:
    function = _get_function(name)
    require(user_of(request), Action.REWARD, function)
    return function


@require_safe
def reward_list(request: HttpRequest) -> HttpResponse:
    archived = request.GET.get("archived") == "1"
    functions = (
        RewardFunction.objects.filter(archived=archived)
        .select_related("owner")
        .annotate(newest=Max("versions__number"), changed_at=Max("versions__created_at"), count=Count("versions"))
    )
    context = {"functions": functions, "builtins": BUILTINS, "archived": archived}
    return render(request, "rewards/list.html", context)


@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    form = FunctionForm(request.POST or None, initial={"source": STARTER})
    problems: list[Any] = []
    if request.method == "POST" and form.is_valid():
        try:
            function = services.create_function(
                form.cleaned_data["source"], form.cleaned_data["description"], user_of(request)
            )
        except services.Invalid as invalid:
            problems = invalid.problems
        else:
            messages.success(request, f"Stored {function.name}, version 1. Runs can use it now.")
            return redirect("rewards:detail", function.name)
    return _editor(request, form, problems)


@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, name: str) -> HttpResponse:
    function = _get_own_function(request, name)
    newest = function.latest
    form = VersionForm(request.POST or None, initial={"source": newest.source if newest else STARTER})
    problems: list[Any] = []
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        try:
            version = services.add_version(function, data["source"], data["note"], user_of(request))
        except services.Invalid as invalid:
            problems = invalid.problems
        else:
            if newest is not None and version.number == newest.number:
                messages.info(request, f"Nothing changed: this is version {version.number} already.")
            else:
                messages.success(request, f"Stored version {version.number}. Runs made before keep theirs.")
            return redirect("rewards:detail", function.name)
    return _editor(request, form, problems, function)


def _editor(
    request: HttpRequest, form: FunctionForm | VersionForm, problems: list[Any], function: RewardFunction | None = None
) -> HttpResponse:
    context = {"form": form, "problems": problems, "function": function, "test_form": TryForm()}
    return render(request, "rewards/edit.html", context, status=422 if problems or form.errors else 200)


@require_safe
def detail(request: HttpRequest, name: str) -> HttpResponse:
    function = _get_function(name)
    newest = function.latest
    if newest is None:
        raise Http404(f"{name} has no version.")
    return _version_page(request, function, newest)


@require_safe
def version(request: HttpRequest, name: str, number: int) -> HttpResponse:
    function = _get_function(name)
    return _version_page(request, function, get_object_or_404(function.versions, number=number))


def _version_page(request: HttpRequest, function: RewardFunction, shown: RewardVersion) -> HttpResponse:
    versions = list(function.versions.select_related("created_by"))
    against = request.GET.get("against")
    former = next((item for item in versions if str(item.number) == against and item.pk != shown.pk), None)
    if former is None:
        former = next((item for item in versions if item.number < shown.number), None)
    diff = _diff(former, shown) if former else []
    kinds = [kind for kind, _ in diff]
    context = {
        "function": function, "shown": shown, "former": former, "diff": diff,
        "added": kinds.count("add"), "removed": kinds.count("del"), "versions": versions, "usages": services.usages(function),
        "test_form": TryForm(), "may_change": can(user_of(request), Action.REWARD, function),
    }  # fmt: skip
    return render(request, "rewards/detail.html", context)


def _diff(former: RewardVersion, shown: RewardVersion) -> list[tuple[str, str]]:
    """(kind, line) of a unified diff; kinds are add, del, at and same."""
    lines = difflib.unified_diff(former.source.splitlines(), shown.source.splitlines(), n=3, lineterm="")
    kinds = {"+": "add", "-": "del", "@": "at"}
    return [(kinds.get(line[:1], "same"), line) for line in list(lines)[2:]]


@require_POST
def archive(request: HttpRequest, name: str) -> HttpResponse:
    function = _get_own_function(request, name)
    archived = request.POST.get("archived") == "1"
    RewardFunction.objects.filter(pk=function.pk).update(archived=archived)
    text = "is archived; runs that use it keep it." if archived else "can be chosen again."
    log.record(
        request.user, "reward.archived" if archived else "reward.unarchived", f"{function.name} {text}", function
    )
    messages.success(request, f"{function.name} {text}")
    return redirect("rewards:detail", function.name)


@require_POST
def validate(request: HttpRequest) -> JsonResponse:
    """Problems of a source by line, for the editor; the source is read, not run."""
    problems = services.problems_of(request.POST.get("source", ""))
    return JsonResponse({"problems": [{"line": problem.line, "message": problem.text} for problem in problems]})


@require_POST
def test(request: HttpRequest) -> HttpResponse:
    """Try a source on an example or on stored rollouts, in the sandbox. A fragment for htmx, a page without it."""
    form = TryForm(request.POST)
    source = request.POST.get("source", "").replace("\r\n", "\n")
    outcome = run_test(source, form) if form.is_valid() else None
    template = "rewards/test_result.html" if request.headers.get("HX-Request") else "rewards/test_page.html"
    return render(request, template, {"outcome": outcome, "form": form})
