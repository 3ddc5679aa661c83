"""Deleting checkpoints."""

from __future__ import annotations

import shutil

from django.db import transaction
from django.utils import timezone

from webapp.accounts.models import User
from webapp.checkpoints import files
from webapp.checkpoints.models import Checkpoint, Export
from webapp.runs.lifecycle import Refused, record
from webapp.runs.models import LIVE, Run


def delete_checkpoint(checkpoint: Checkpoint, actor: User) -> int:
    """Delete the folder of a checkpoint; returns the bytes freed.

    Raises Refused while an attempt is resuming from it, while something is made of it, and when it is gone already.
    """
    with transaction.atomic():
        run = Run.objects.select_for_update().get(pk=checkpoint.run_id)
        attempt = run.current_attempt
        if run.state in LIVE and attempt is not None and attempt.resumed_from_id == checkpoint.pk:
            raise Refused(
                f"The run is resuming from step {checkpoint.step}; stop it before you delete this checkpoint."
            )
        if checkpoint.exports.filter(state__in=(Export.State.QUEUED, Export.State.RUNNING)).exists():
            raise Refused(
                f"The checkpoint of step {checkpoint.step} is being merged or pushed; wait until that is done."
            )
        if not Checkpoint.objects.filter(pk=checkpoint.pk, deleted_at=None).update(deleted_at=timezone.now()):
            raise Refused(f"The checkpoint of step {checkpoint.step} is deleted already.")
        freed = sum(file.size for file in files.listing(checkpoint)) or checkpoint.size_bytes
        record(run, "checkpoint_deleted", f"The checkpoint of step {checkpoint.step} was deleted.", actor=actor,
               step=checkpoint.step, freed_bytes=freed)  # fmt: skip
        # A later attempt may have written the same step again: then the folder is that one's.
        if not run.checkpoints.filter(step=checkpoint.step, deleted_at=None).exists() and checkpoint.folder.is_dir():
            shutil.rmtree(checkpoint.folder)
    return freed
