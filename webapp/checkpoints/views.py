"""Downloads of checkpoints, by id; the API serves the same under /api/checkpoints/."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_safe

from webapp.checkpoints import files
from webapp.checkpoints.card import CURVE_FILE, card_files
from webapp.checkpoints.models import Checkpoint, Export


@require_safe
async def download(request: HttpRequest, checkpoint_id: int, name: str) -> HttpResponseBase:
    """One file."""
    return await sync_to_async(one_file)(request, checkpoint_id, name)


@require_safe
async def download_zip(request: HttpRequest, checkpoint_id: int, part: str) -> HttpResponseBase:
    """What is needed to use the model ("model"), or everything, optimizer state included ("all")."""
    return await sync_to_async(many_files)(request, checkpoint_id, part)


@require_safe
async def download_merged(request: HttpRequest, export_id: int, name: str) -> HttpResponseBase:
    """One file of merged weights."""
    return await sync_to_async(one_merged_file)(request, export_id, name)


@require_safe
async def download_merged_zip(request: HttpRequest, export_id: int) -> HttpResponseBase:
    """All of them."""
    return await sync_to_async(merged_files)(request, export_id)


@require_safe
def card(request: HttpRequest, checkpoint_id: int, name: str) -> HttpResponseBase:
    """A file of the model card that is made anew for each download: its text, or the reward curve as a picture."""
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run", "attempt"), pk=checkpoint_id)
    text = card_files(checkpoint).get(name)
    if text is None:
        raise Http404("The model card has no such file.")
    kind = "image/svg+xml" if name == CURVE_FILE else "text/plain; charset=utf-8"
    return HttpResponse(text, content_type=kind, headers={
        "Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'",
    })  # fmt: skip


def one_file(request: HttpRequest, checkpoint_id: int, name: str) -> HttpResponseBase:
    """Raises Http404 with a sentence."""
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run"), pk=checkpoint_id)
    file = files.find(checkpoint, name)
    if file is None:
        raise Http404(f"Step {checkpoint.step} has no file of this name; its folder may have been deleted.")
    return files.send_file(request, file)


def many_files(request: HttpRequest, checkpoint_id: int, part: str) -> HttpResponseBase:
    """Raises Http404 with a sentence."""
    checkpoint = get_object_or_404(Checkpoint.objects.select_related("run", "attempt"), pk=checkpoint_id)
    chosen = [file for file in files.listing(checkpoint) if part == "all" or file.part == part]
    if not chosen:
        raise Http404(f"Step {checkpoint.step} has no such files; its folder may have been deleted.")
    kind = checkpoint.kind if part == "model" else part
    texts = {} if part == "resume" else card_files(checkpoint)
    return files.send_zip(request, chosen, _zip_name(checkpoint, kind), texts)


def one_merged_file(request: HttpRequest, export_id: int, name: str) -> HttpResponseBase:
    """Raises Http404 with a sentence."""
    file = files.find(_merged(export_id), name)
    if file is None:
        raise Http404("The merged weights have no file of this name.")
    return files.send_file(request, file)


def merged_files(request: HttpRequest, export_id: int) -> HttpResponseBase:
    """Raises Http404 with a sentence."""
    export = _merged(export_id)
    return files.send_zip(request, files.listing(export), _zip_name(export.checkpoint, "merged"))


def _merged(export_id: int) -> Export:
    done = Export.objects.select_related("checkpoint__run").filter(kind=Export.Kind.MERGE, state=Export.State.DONE)
    found = done.filter(pk=export_id).first()
    if found is None or not found.folder.is_dir():
        raise Http404("There are no such merged weights; they may have been deleted.")
    return found


def _zip_name(checkpoint: Checkpoint, kind: str) -> str:
    return f"run-{str(checkpoint.run_id)[:8]}-step-{checkpoint.step}-{kind}"
