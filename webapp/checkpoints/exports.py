"""Asking for merges and pushes, and taking them away. Workers do them (workers/exporting.py)."""

from __future__ import annotations

import re
import shutil

from django.db import transaction

from webapp.accounts.models import User
from webapp.checkpoints.models import Checkpoint, Export
from webapp.runs.lifecycle import Refused, notify_queued, record
from webapp.secrets import services as secrets

HUB_TOKEN = "HF_TOKEN"
"""The name of the secret that holds a person's token of the hub."""
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
TOKEN = re.compile(r"[\x21-\x7e]{8,200}")


def request_merge(checkpoint: Checkpoint, actor: User) -> Export:
    """Queue the merge of an adapter into its base model. Raises Refused with a sentence."""
    if checkpoint.kind != Checkpoint.Kind.ADAPTER:
        raise Refused(f"The checkpoint of step {checkpoint.step} holds full weights; there is no adapter to merge.")
    with transaction.atomic():
        locked = _lock(checkpoint)
        there = locked.exports.filter(kind=Export.Kind.MERGE).exclude(state=Export.State.FAILED).first()
        if there is not None:
            is_now = "is merged already" if there.state == Export.State.DONE else "is being merged"
            raise Refused(f"The adapter of step {checkpoint.step} {is_now}.")
        return _queue(locked, actor, f"The adapter of step {checkpoint.step} is to be merged.", kind=Export.Kind.MERGE)


def request_push(checkpoint: Checkpoint, actor: User, repo: str, *, private: bool, merged: bool = False) -> Export:
    """Queue a push to the hub under `actor`'s token. Raises Refused with a sentence."""
    if not REPO.fullmatch(repo):
        raise Refused(
            f"{repo[:100]!r} is no name of a model on the hub; give one such as your-name/my-model (letters, digits, - _ .)."
        )
    if not has_token(actor):
        raise Refused("You have stored no hub token; give one with write access.")
    with transaction.atomic():
        locked = _lock(checkpoint)
        if locked.exports.filter(kind=Export.Kind.PUSH, state__in=(Export.State.QUEUED, Export.State.RUNNING)).exists():
            raise Refused(f"The checkpoint of step {checkpoint.step} is being pushed; wait until that is done.")
        if merged and merge_of(locked) is None:
            raise Refused(f"The adapter of step {checkpoint.step} is not merged; merge it first, or push the adapter.")
        text = f"The checkpoint of step {checkpoint.step} is to be pushed to {repo}."
        return _queue(locked, actor, text, kind=Export.Kind.PUSH, repo=repo, private=private, merged=merged)


def store_token(user: User, token: str) -> None:
    """Keep a token of the hub as one of this person's secrets. Raises Refused when it can be none."""
    if not TOKEN.fullmatch(token):
        raise Refused(
            f"What was given is no hub token: it has {len(token)} characters; one has 8 to 200, without spaces."
        )
    try:
        secrets.store(user, HUB_TOKEN, token)
    except secrets.Invalid as error:
        raise Refused(f"The hub token can't be stored: {error}") from error


def has_token(user: User) -> bool:
    """Whether there is one for this person, of their own or shared by an admin."""
    return any(secret.name == HUB_TOKEN for secret in secrets.visible_to(user))


def merge_of(checkpoint: Checkpoint) -> Export | None:
    """The merged weights of a checkpoint, once they are there."""
    return checkpoint.exports.filter(kind=Export.Kind.MERGE, state=Export.State.DONE).first()


def delete_export(export: Export, actor: User) -> int:
    """Delete merged weights, or the note of a push or a failure; returns the bytes freed. Raises Refused while it runs."""
    with transaction.atomic():
        found = Export.objects.select_for_update().get(pk=export.pk)
        if found.state == Export.State.RUNNING:
            raise Refused("It is being worked on; wait until it is done.")
        if found.kind == Export.Kind.MERGE:
            pushes = found.checkpoint.exports.filter(kind=Export.Kind.PUSH, merged=True)
            if pushes.filter(state__in=(Export.State.QUEUED, Export.State.RUNNING)).exists():
                raise Refused("The merged weights are being pushed; wait until that is done.")
            text = f"The merged weights of step {found.checkpoint.step} were deleted."
            record(found.checkpoint.run, "merge_deleted", text, actor=actor, freed_bytes=found.size_bytes)
        if found.folder.is_dir():
            shutil.rmtree(found.folder)
        found.delete()
    return export.size_bytes


def _lock(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint's row, which makes two requests at once wait for each other. Raises Refused when it is gone."""
    found = Checkpoint.objects.select_for_update(of=("self",)).select_related("run").filter(pk=checkpoint.pk).first()
    if found is None or found.deleted_at is not None or not found.folder.is_dir():
        raise Refused(f"The checkpoint of step {checkpoint.step} is deleted.")
    return found


def _queue(checkpoint: Checkpoint, actor: User, event: str, **fields: object) -> Export:
    record(checkpoint.run, "export_requested", event, actor=actor, step=checkpoint.step)
    export = Export.objects.create(checkpoint=checkpoint, owner=actor, text="Waits for a worker.", **fields)
    transaction.on_commit(notify_queued, robust=True)
    return export
