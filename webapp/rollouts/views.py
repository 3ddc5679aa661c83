"""What the model said and what it earned: groups side by side, single rollouts, old against new. All of it shown as text."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from webapp.accounts.models import User
from webapp.rollouts import queries
from webapp.rollouts.models import RolloutTokens, StoredRollout
from webapp.rollouts.text import messages
from webapp.runs import page as run_page
from webapp.runs.models import Run

GROUPS_A_PAGE = 6
PROMPTS_A_PAGE = 50
COLOURS = ("ratio", "advantage", "entropy", "mask")


def _page(request: HttpRequest, run_id: UUID) -> tuple[Run, dict[str, Any]]:
    run = get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)
    assert isinstance(request.user, User)
    colour = request.GET.get("colour", "")
    return run, {
        "run": run, "tab": "rollouts", "head": run_page.head(run, request.user), "colours": COLOURS,
        "colour": colour if colour in COLOURS else "",
    }  # fmt: skip


@require_safe
def rollouts(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """Groups of one step, or those in which something is searched for."""
    run, context = _page(request, run_id)
    search = queries.Search.of(request.GET)
    steps = queries.steps_around(run, request.GET.get("step", ""))
    page = Paginator(queries.group_ids(run, steps.at, search), GROUPS_A_PAGE).get_page(request.GET.get("page"))
    found = queries.groups(run, [group_id for group_id, _ in page.object_list], search)
    context |= {"steps": steps, "search": search, "page": page, "groups": found, "values": request.GET}
    return render(request, "rollouts/list.html", context)


@require_safe
def rollout(request: HttpRequest, run_id: UUID, rollout_id: int) -> HttpResponse:
    """One rollout, whole."""
    run, context = _page(request, run_id)
    shown = get_object_or_404(run.rollouts.select_related("attempt").defer("text"), pk=rollout_id)
    group = queries.groups(run, [shown.group_id])[0]
    took = shown.data.get("duration_s")
    context |= {
        "shown": shown, "group": group, "took": took if isinstance(took, int | float) else None,
        "prompt": messages(shown.data.get("prompt"), "user"),
        "completion": messages(shown.data.get("completion"), "assistant"),
        "weights": {reward.name: reward.weight for reward in run.run_spec().rewards} if run.spec else {},
        "url": request.build_absolute_uri(request.path),
    }  # fmt: skip
    return render(request, "rollouts/detail.html", context)


@require_safe
def compare(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """Prompts that came up at several steps; with `row`, one of them at two steps side by side."""
    run, context = _page(request, run_id)
    row = request.GET.get("row", "")
    if not row.lstrip("-").isdecimal() or abs(int(row)) >= 2**62:
        prompts = Paginator(queries.repeated_prompts(run), PROMPTS_A_PAGE)
        return render(request, "rollouts/prompts.html", {**context, "page": prompts.get_page(request.GET.get("page"))})
    steps = queries.steps_of(run, int(row))
    if not steps:
        raise Http404(f"The run has stored no rollouts of row {row}.")
    chosen = [_one_of(request.GET.get("old"), steps, steps[0]), _one_of(request.GET.get("new"), steps, steps[-1])]
    sides = [(step, _groups_at(run, int(row), step)) for step in chosen]
    context |= {"row": int(row), "steps": steps, "old": chosen[0], "new": chosen[1], "sides": sides}
    return render(request, "rollouts/compare.html", context)


def _one_of(text: str | None, steps: list[int], default: int) -> int:
    return next((step for step in steps if str(step) == text), default)


def _groups_at(run: Run, row: int, step: int) -> list[queries.Group]:
    ids = run.rollouts.filter(row_index=row, step=step).order_by("id").values_list("group_id", flat=True)
    return queries.groups(run, list(dict.fromkeys(ids)))


@require_safe
def tokens(request: HttpRequest, run_id: UUID) -> JsonResponse:
    """Tokens of the rollouts of `group` by the rollout's id, in the order of their sequences."""
    group_id = request.GET.get("group", "")
    found = RolloutTokens.objects.filter(rollout__run_id=run_id, rollout__group_id=group_id).order_by("sequence")
    by_rollout: dict[int, list[Any]] = {
        pk: [] for pk in StoredRollout.objects.filter(run_id=run_id, group_id=group_id).values_list("pk", flat=True)
    }
    if not by_rollout:
        raise Http404("The run has no such group.")
    for item in found:
        by_rollout[item.rollout_id].append(item.data)
    return JsonResponse({"rollouts": by_rollout})
