"""Downloads of checkpoints, by id; the API serves the same under /api/checkpoints/."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_safe

from webapp.checkpoints import files
from webapp.checkpoints.models import Checkpoint


@require_safe
async def download(request: HttpRequest, checkpoint_id: int, name: str) -> HttpResponseBase:
    """One file."""
    return await sync_to_async(one_file)(request, checkpoint_id, name)


@require_safe
async def download_zip(request: HttpRequest, checkpoint_id: int, part: str) -> HttpResponseBase:
    """What is needed to use the model ("model"), or everything, optimizer state included ("all")."""
    return await sync_to_async(many_files)(request, checkpoint_id, part)


def one_file(request: HttpRequest, checkpoint_id: int, name: str) -> HttpResponseBase:
    """Raises Http404 with a sentence."""
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run"), pk=checkpoint_id)
    file = files.find(checkpoint, name)
    if file is None:
        raise Http404(f"Step {checkpoint.step} has no file of this name; its folder may have been deleted.")
    return files.send_file(request, file)


def many_files(request: HttpRequest, checkpoint_id: int, part: str) -> HttpResponseBase:
    """Raises Http404 with a sentence."""
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run"), pk=checkpoint_id)
    chosen = [file for file in files.listing(checkpoint) if part == "all" or file.part == part]
    if not chosen:
        raise Http404(f"Step {checkpoint.step} has no such files; its folder may have been deleted.")
    kind = checkpoint.kind if part == "model" else part
    return files.send_zip(request, chosen, f"run-{str(checkpoint.run_id)[:8]}-step-{checkpoint.step}-{kind}")
