"""What the model said and what it earned: groups side by side, by step. Everything a model wrote is shown as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from uuid import UUID

from django.core.paginator import Paginator
from django.db.models import Max, Q, QuerySet
from django.db.models.fields.json import KT
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from webapp.accounts.models import User
from webapp.rollouts.models import StoredRollout
from webapp.runs import page as run_page
from webapp.runs.models import Run

GROUPS_A_PAGE = 6


@dataclass
class Group:
    """Rollouts of one prompt, the best first."""

    step: int
    group_id: str
    row_index: int
    rollouts: list[StoredRollout]

    @property
    def prompt(self) -> list[dict[str, Any]]:
        return as_messages(self.rollouts[0].data.get("prompt"), "user")

    @property
    def dropped(self) -> str:
        return self.rollouts[0].data.get("dropped") or ""

    @property
    def long(self) -> bool:
        """Whether a completion needs a wide column."""
        return any(rollout.data.get("tokens", 0) > 60 for rollout in self.rollouts)

    @property
    def mean(self) -> float | None:
        known = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        return sum(known) / len(known) if known else None


def as_messages(value: Any, role: str) -> list[dict[str, Any]]:
    """A prompt or completion as messages with `role`, `content` (text) and `tool_calls`."""
    if not isinstance(value, list):
        return [{"role": role, "content": "" if value is None else str(value)}]
    return [message if isinstance(message, dict) else {"role": role, "content": str(message)} for message in value]


@require_safe
def rollouts(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)
    assert isinstance(request.user, User)
    search = request.GET.get("search", "").strip()
    steps = list(run.rollouts.order_by("step").values_list("step", flat=True).distinct())
    step = _chosen_step(request.GET.get("step", ""), steps)
    page = Paginator(_group_ids(run, step, search), GROUPS_A_PAGE).get_page(request.GET.get("page"))
    at = steps.index(step) if step in steps else 0
    context = {
        "run": run, "tab": "rollouts", "head": run_page.head(run, request.user), "steps": steps, "step": step,
        "search": search, "page": page, "groups": _groups(run, page.object_list),
        "previous": steps[at - 1] if at > 0 else None, "next": steps[at + 1] if at + 1 < len(steps) else None,
    }  # fmt: skip
    return render(request, "rollouts/list.html", context)


def _chosen_step(text: str, steps: list[int]) -> int | None:
    """The step that was asked for if it has rollouts, otherwise the newest."""
    if text.lstrip("-").isdigit() and int(text) in steps:
        return int(text)
    return steps[-1] if steps else None


def _group_ids(run: Run, step: int | None, search: str) -> QuerySet[StoredRollout, tuple[str, int]]:
    """(group_id, last row) of the groups to show: of a step, or of all steps when something is searched for."""
    found = run.rollouts.all()
    if search:
        escaped = json.dumps(search)[1:-1]  # as SQLite holds it: with non-ASCII letters escaped
        found = found.annotate(prompt=KT("data__prompt"), completion=KT("data__completion")).filter(
            Q(prompt__icontains=search) | Q(completion__icontains=search)
            | Q(prompt__icontains=escaped) | Q(completion__icontains=escaped)
        )  # fmt: skip
    elif step is not None:
        found = found.filter(step=step)
    newest = "-last" if search else "last"
    return found.order_by().values_list("group_id").annotate(last=Max("id")).order_by(newest)


def _groups(run: Run, wanted: Any) -> list[Group]:
    ids = [group_id for group_id, _ in wanted]
    rows = sorted(run.rollouts.filter(group_id__in=ids), key=lambda row: (ids.index(row.group_id), row.pk))
    groups = []
    for group_id, members in groupby(rows, key=lambda row: row.group_id):
        best_first = sorted(members, key=lambda row: (row.reward is None, -(row.reward or 0.0), row.pk))
        for rollout in best_first:
            rollout.messages = as_messages(rollout.data.get("completion"), "assistant")  # type: ignore[attr-defined]
        groups.append(Group(best_first[0].step, group_id, best_first[0].row_index, best_first))
    return groups
