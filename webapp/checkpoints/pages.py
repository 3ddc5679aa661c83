"""The checkpoints of a run, as a page. Downloads are in views.py."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from webapp.accounts.permissions import Action, require, user_of
from webapp.checkpoints import exports as requests
from webapp.checkpoints import files, services
from webapp.checkpoints.models import Checkpoint, Export
from webapp.fragments import unless_seen
from webapp.runs import page as run_page
from webapp.runs.lifecycle import Refused
from webapp.runs.models import Run
from webapp.runs.services import may_change
from webapp.templatetags.offbeat import size


def _get_own_checkpoint(request: HttpRequest, run_id: UUID, checkpoint_id: int) -> Checkpoint:
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run"), pk=checkpoint_id, run_id=run_id)
    require(user_of(request), Action.RUN, checkpoint.run)
    return checkpoint


@require_safe
def run_checkpoints(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)
    files.mark_deleted(run)
    rows: list[dict[str, Any]] = []
    kept = Q(deleted_at=None) | Q(exports__kind=Export.Kind.MERGE, exports__state=Export.State.DONE)
    for checkpoint in run.checkpoints.select_related("attempt").filter(kept).distinct():
        listed = files.listing(checkpoint)
        rows.append({
            "checkpoint": checkpoint,
            "model": [file for file in listed if file.part == "model"],
            "resume": [file for file in listed if file.part == "resume"],
            "size": sum(file.size for file in listed) or (0 if checkpoint.deleted_at else checkpoint.size_bytes),
            **_exports(checkpoint),
        })  # fmt: skip
    context = {
        "run": run, "tab": "checkpoints", "head": run_page.head(run, user_of(request)), "rows": rows,
        "total": sum(row["size"] + row["merged_size"] for row in rows), "has_token": requests.has_token(user_of(request)),
        "gone": run.checkpoints.exclude(deleted_at=None).count(),
    }  # fmt: skip
    return render(request, "checkpoints/list.html", context)


def _exports(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was made of a checkpoint, for its panel."""
    found = list(checkpoint.exports.select_related("owner"))
    merges = [export for export in found if export.kind == Export.Kind.MERGE and export.state != Export.State.FAILED]
    return {
        "exports": found, "working": any(export.open for export in found), "merges": merges,
        "merged": any(export.state == Export.State.DONE for export in merges),
        "merged_size": sum(export.size_bytes for export in merges),
    }  # fmt: skip


@require_safe
def exports(request: HttpRequest, run_id: UUID, checkpoint_id: int) -> HttpResponse:
    """What is being made of a checkpoint, for its panel to ask again and again."""
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run"), pk=checkpoint_id, run_id=run_id)
    context = {
        "run": checkpoint.run, "row": {"checkpoint": checkpoint, **_exports(checkpoint)},
        "may_change": may_change(user_of(request), checkpoint.run),
    }  # fmt: skip
    return unless_seen(request, render_to_string("checkpoints/exports.html", context, request=request))


@require_POST
def merge(request: HttpRequest, run_id: UUID, checkpoint_id: int) -> HttpResponse:
    checkpoint = _get_own_checkpoint(request, run_id, checkpoint_id)
    try:
        requests.request_merge(checkpoint, user_of(request))
    except Refused as refusal:
        messages.error(request, str(refusal))
    return _back(run_id, checkpoint_id)


@require_POST
def push(request: HttpRequest, run_id: UUID, checkpoint_id: int) -> HttpResponse:
    """Push to the hub; a token that comes along is kept for the next time, and never shown."""
    checkpoint = _get_own_checkpoint(request, run_id, checkpoint_id)
    token = request.POST.get("token", "").strip()
    try:
        if token:
            requests.store_token(user_of(request), token)
        repo = request.POST.get("repo", "").strip()
        private, merged = request.POST.get("private") == "on", request.POST.get("merged") == "on"
        requests.request_push(checkpoint, user_of(request), repo, private=private, merged=merged)
    except Refused as refusal:
        messages.error(request, str(refusal))
    return _back(run_id, checkpoint_id)


@require_POST
def delete_export(request: HttpRequest, run_id: UUID, export_id: int) -> HttpResponse:
    export = get_object_or_404(
        Export.objects.select_related("checkpoint__run"), pk=export_id, checkpoint__run_id=run_id
    )
    require(user_of(request), Action.RUN, export.checkpoint.run)
    try:
        freed = requests.delete_export(export, user_of(request))
    except Refused as refusal:
        messages.error(request, str(refusal))
    else:
        if freed:
            messages.success(request, f"Deleted the merged weights; {size(freed)} are free again.")
    return _back(run_id, export.checkpoint_id)


def _back(run_id: UUID, checkpoint_id: int) -> HttpResponse:
    return redirect(f"{reverse('runs:checkpoints', args=[run_id])}#checkpoint-{checkpoint_id}")


@require_POST
def delete(request: HttpRequest, run_id: UUID, checkpoint_id: int) -> HttpResponse:
    checkpoint = _get_own_checkpoint(request, run_id, checkpoint_id)
    try:
        freed = services.delete_checkpoint(checkpoint, user_of(request))
    except Refused as refusal:
        messages.error(request, str(refusal))
    except OSError as error:
        messages.error(request, f"The checkpoint of step {checkpoint.step} could not be deleted: {error.strerror}.")
    else:
        messages.success(request, f"Deleted the checkpoint of step {checkpoint.step}; {size(freed)} are free again.")
    return redirect("runs:checkpoints", run_id)
