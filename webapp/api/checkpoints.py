"""Checkpoints: list, files, downloads."""

from __future__ import annotations

from typing import Any, Literal
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponseBase
from django.urls import reverse
from ninja import Router, Status

from webapp.accounts.permissions import user_of
from webapp.api.auth import get_own_run, get_run
from webapp.api.openapi import FILE, STREAM
from webapp.api.schemas import CheckpointOut, Detail, ExportOut, Freed, Id, Problems, PushIn
from webapp.checkpoints import exports, files, services, views
from webapp.checkpoints.models import Checkpoint, Export

router = Router(tags=["checkpoints"])
ERRORS = {401: Detail, 403: Detail, 404: Detail, 409: Detail, 422: Problems}


@router.get("/runs/{uuid:run_id}/checkpoints", response={200: list[CheckpointOut], 404: Detail})
def list_(request: HttpRequest, run_id: UUID, deleted: bool = False) -> list[dict[str, Any]]:
    """Checkpoints of a run, newest first; with `deleted` those too whose files are gone."""
    run = get_run(run_id)
    files.mark_deleted(run)
    found = run.checkpoints.select_related("run", "attempt")
    return [_as_out(request, item) for item in (found if deleted else found.filter(deleted_at=None))]


@router.get("/checkpoints/{int:checkpoint_id}", response={200: CheckpointOut, 404: Detail})
def get(request: HttpRequest, checkpoint_id: Id) -> dict[str, Any]:
    return _as_out(request, _get(checkpoint_id))


@router.api_operation(
    ["GET", "HEAD"],
    "/checkpoints/{int:checkpoint_id}/files/{path:name}",
    response={200: None, 404: Detail},
    url_name="file",
    openapi_extra=FILE,
)
def download(request: HttpRequest, checkpoint_id: Id, name: str) -> HttpResponseBase:
    """One file; Range, If-Range and ETag work, so that a download can go on where it broke off."""
    return views.one_file(request, checkpoint_id, name)


@router.api_operation(
    ["GET", "HEAD"],
    "/checkpoints/{int:checkpoint_id}/zip",
    response={200: None, 404: Detail},
    url_name="zip",
    openapi_extra=STREAM,
)
def download_zip(
    request: HttpRequest, checkpoint_id: Id, part: Literal["model", "resume", "all"] = "model"
) -> HttpResponseBase:
    """Several files as one zip: what is needed to use the model, what is needed to resume, or all."""
    return views.many_files(request, checkpoint_id, part)


@router.get(
    "/checkpoints/{int:checkpoint_id}/sha256/{path:name}",
    response={200: dict[str, str], 404: Detail},
    url_name="sha256",
)
def sha256(request: HttpRequest, checkpoint_id: Id, name: str) -> dict[str, str]:
    """The digest of a file; reads all of it."""
    file = files.find(_get(checkpoint_id), name)
    if file is None:
        raise Http404("The checkpoint has no file of this name.")
    return {"name": file.name, "sha256": files.sha256(file)}


@router.delete("/checkpoints/{int:checkpoint_id}", response={200: Freed, **ERRORS})
def delete(request: HttpRequest, checkpoint_id: Id) -> dict[str, int]:
    """Delete the files of a checkpoint. 409 while an attempt resumes from it, or something is made of it."""
    return {"freed_bytes": services.delete_checkpoint(_get_own(request, checkpoint_id), user_of(request))}


@router.get("/checkpoints/{int:checkpoint_id}/exports", response={200: list[ExportOut], 404: Detail})
def list_exports(request: HttpRequest, checkpoint_id: Id) -> Any:
    """Merges and pushes of a checkpoint, newest first."""
    return [_export_out(request, export) for export in _get(checkpoint_id).exports.all()]


@router.post("/checkpoints/{int:checkpoint_id}/merge", response={202: ExportOut, **ERRORS})
def merge(request: HttpRequest, checkpoint_id: Id) -> Status[Any]:
    """Merge an adapter into its base model. It is queued; `exports` says how far it is."""
    export = exports.request_merge(_get_own(request, checkpoint_id), user_of(request))
    return Status(202, _export_out(request, export))


@router.post("/checkpoints/{int:checkpoint_id}/push", response={202: ExportOut, **ERRORS})
def push(request: HttpRequest, checkpoint_id: Id, body: PushIn) -> Status[Any]:
    """Push to the Hugging Face hub under the token that you stored on the checkpoints page. It is queued."""
    checkpoint, user = _get_own(request, checkpoint_id), user_of(request)
    export = exports.request_push(checkpoint, user, body.repo, private=body.private, merged=body.merged)
    return Status(202, _export_out(request, export))


@router.api_operation(
    ["GET", "HEAD"],
    "/checkpoints/{int:checkpoint_id}/merged/zip",
    response={200: None, 404: Detail},
    url_name="merged_zip",
    openapi_extra=STREAM,
)
def download_merged(request: HttpRequest, checkpoint_id: Id) -> HttpResponseBase:
    """The merged weights as one zip."""
    export = exports.merge_of(_get(checkpoint_id))
    if export is None:
        raise Http404("The checkpoint is not merged.")
    return views.merged_files(request, export.pk)


def _export_out(request: HttpRequest, export: Export) -> dict[str, Any]:
    done = export.kind == Export.Kind.MERGE and export.state == Export.State.DONE
    path = reverse("api:merged_zip", kwargs={"checkpoint_id": export.checkpoint_id})
    names = ("id", "kind", "state", "text", "share", "size_bytes", "repo", "created_at", "ended_at")
    link = request.build_absolute_uri(path) if done else export.url
    return {**{name: getattr(export, name) for name in names}, "url": link}


def _get_own(request: HttpRequest, checkpoint_id: int) -> Checkpoint:
    """A checkpoint of a run that the account may change. Raises Http404, or PermissionDenied with a sentence."""
    checkpoint = _get(checkpoint_id)
    get_own_run(request, checkpoint.run_id)
    return checkpoint


def _get(checkpoint_id: int) -> Checkpoint:
    found = Checkpoint.objects.select_related("run", "attempt").filter(pk=checkpoint_id).first()
    if found is None:
        raise Http404(f"There is no checkpoint {checkpoint_id}.")
    return found


def _as_out(request: HttpRequest, checkpoint: Checkpoint) -> dict[str, Any]:
    def url(route: str, /, **arguments: Any) -> str:
        path = reverse(f"api:{route}", kwargs={"checkpoint_id": checkpoint.pk, **arguments})
        return request.build_absolute_uri(path)

    return {
        **{name: getattr(checkpoint, name) for name in (
            "id", "step", "kind", "size_bytes", "reward", "evaluation", "best", "created_at", "deleted_at",
        )},
        "run": checkpoint.run_id, "attempt": checkpoint.attempt.number, "zip_url": url("zip"),
        "files": [
            {"name": file.name, "size": file.size, "part": file.part, "url": url("file", name=file.name)}
            for file in (files.listing(checkpoint) if checkpoint.deleted_at is None else [])
        ],
    }  # fmt: skip
