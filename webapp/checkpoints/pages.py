"""The checkpoints of a run, as a page. Downloads are in views.py."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from webapp.accounts.models import User
from webapp.accounts.permissions import Action, require
from webapp.checkpoints import files, services
from webapp.checkpoints.models import Checkpoint
from webapp.runs import page as run_page
from webapp.runs.lifecycle import Refused
from webapp.runs.models import Run
from webapp.templatetags.offbeat import size


def _user(request: HttpRequest) -> User:
    assert isinstance(request.user, User)
    return request.user


def _get_own_checkpoint(request: HttpRequest, run_id: UUID, checkpoint_id: int) -> Checkpoint:
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run"), pk=checkpoint_id, run_id=run_id)
    require(_user(request), Action.RUN, checkpoint.run)
    return checkpoint


@require_safe
def run_checkpoints(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)
    files.mark_deleted(run)
    rows: list[dict[str, Any]] = []
    for checkpoint in run.checkpoints.select_related("attempt").filter(deleted_at=None):
        listed = files.listing(checkpoint)
        rows.append({
            "checkpoint": checkpoint,
            "model": [file for file in listed if file.part == "model"],
            "resume": [file for file in listed if file.part == "resume"],
            "size": sum(file.size for file in listed) or checkpoint.size_bytes,
        })  # fmt: skip
    context = {
        "run": run, "tab": "checkpoints", "head": run_page.head(run, _user(request)), "rows": rows,
        "total": sum(row["size"] for row in rows), "gone": run.checkpoints.exclude(deleted_at=None).count(),
    }  # fmt: skip
    return render(request, "checkpoints/list.html", context)


@require_POST
def delete(request: HttpRequest, run_id: UUID, checkpoint_id: int) -> HttpResponse:
    checkpoint = _get_own_checkpoint(request, run_id, checkpoint_id)
    try:
        freed = services.delete_checkpoint(checkpoint, _user(request))
    except Refused as refusal:
        messages.error(request, str(refusal))
    except OSError as error:
        messages.error(request, f"The checkpoint of step {checkpoint.step} could not be deleted: {error.strerror}.")
    else:
        messages.success(request, f"Deleted the checkpoint of step {checkpoint.step}; {size(freed)} are free again.")
    return redirect("runs:checkpoints", run_id)
