"""Merges and pushes of checkpoints: each in a process of its own, watched by a thread of this host's worker.

A worker never loads a model. The process ends when its standard input is closed, so it does not outlive the worker; what was
going on then is found again by its old heartbeat, and said to have failed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from django.db import DatabaseError, InterfaceError, connection
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from webapp.checkpoints import files
from webapp.checkpoints.card import card_files
from webapp.checkpoints.exports import HUB_TOKEN, merge_of
from webapp.checkpoints.models import Export
from webapp.runs.lifecycle import record
from webapp.runs.models import Event
from webapp.secrets import services as secrets
from workers import processes
from workers.launching import NOT_FOR_CHILDREN
from workers.preparation import CannotStart, find_model

logger = logging.getLogger(__name__)
HEARTBEAT_S = 5.0
DEADLINE_S = 12 * 3600.0
"""A process that takes longer than this hangs, and is killed."""
SILENT_FOR = timedelta(seconds=60)
"""After this long without a heartbeat whoever worked on an export is gone."""
_working = threading.Lock()


class Failed(Exception):
    """The text is one sentence."""


def start_queued(host_name: str) -> None:
    """Take the oldest export whose files are on this host, unless one is being worked on here. Returns at once."""
    _give_up_silent()
    of_host = Q(checkpoint__attempt__host__name=host_name) | Q(checkpoint__attempt__host=None)
    waiting = Export.objects.filter(of_host, state=Export.State.QUEUED).order_by("id")
    export = waiting.first()
    if export is None or not _working.acquire(blocking=False):
        return
    taken = Export.objects.filter(pk=export.pk, state=Export.State.QUEUED).update(
        state=Export.State.RUNNING, heartbeat_at=Now(), text="Starts."
    )
    if not taken:
        _working.release()
        return
    threading.Thread(target=_work, args=(export.pk,), daemon=True, name=f"export-{export.pk}").start()


def _give_up_silent() -> None:
    silent = Export.objects.filter(state=Export.State.RUNNING, heartbeat_at__lt=timezone.now() - SILENT_FOR)
    silent.update(
        state=Export.State.FAILED, ended_at=Now(), text="The worker that did this ended meanwhile; ask for it again."
    )


def _work(pk: int) -> None:
    try:
        run_export(pk)
    finally:
        _working.release()
        connection.close()


def run_export(pk: int) -> None:
    """Do a running export and write down what became of it."""
    export = Export.objects.select_related("checkpoint__run", "checkpoint__attempt", "owner").get(pk=pk)
    try:
        url = _merge(export) if export.kind == Export.Kind.MERGE else _push(export)
    except (Failed, CannotStart) as error:
        _conclude(export, Export.State.FAILED, str(error))
    except OSError as error:
        logger.exception("Export %s failed", pk)
        _conclude(export, Export.State.FAILED, f"On the run's host: {error.strerror or error}.")
    # a thread has nobody above it: what is not expected must still be said where somebody looks
    except Exception:
        logger.exception("Export %s failed", pk)
        _conclude(export, Export.State.FAILED, "Something unexpected happened; the worker's log has it.")
    else:
        _conclude(export, Export.State.DONE, "", url=url)


def _merge(export: Export) -> str:
    checkpoint = export.checkpoint
    staging = _staging(export)
    try:
        base = find_model(checkpoint.run.run_spec(), staging, lambda text: _note(export, text, 0.02))
        command = ["trainer_core.merge", "--base", str(base), "--adapter", str(checkpoint.folder), "--output"]
        _run(export, [*command, str(staging / "model")], staging / "log", {"CUDA_VISIBLE_DEVICES": ""})
        _note(export, "Writes the model card.", 0.95)
        _write_card(export, staging / "model", merged=True)
        if export.folder.exists():
            shutil.rmtree(export.folder)
        os.replace(staging / "model", export.folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    export.size_bytes = sum(path.stat().st_size for path in export.folder.rglob("*") if path.is_file())
    return ""


def _push(export: Export) -> str:
    checkpoint = export.checkpoint
    try:
        token = secrets.values([HUB_TOKEN], export.owner)[HUB_TOKEN]
    except secrets.Missing as error:
        raise Failed(str(error)) from error
    source = merge_of(checkpoint) if export.merged else checkpoint
    if source is None or not source.folder.is_dir():
        raise Failed("The files to push are gone.")
    staging = _staging(export)
    try:
        for file in files.listing(source):
            if file.part == "model":
                target = staging / "model" / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file.path)
        _write_card(export, staging / "model", merged=export.merged)
        command = ["trainer_core.push", "--folder", str(staging / "model"), "--repo", export.repo]
        environment = {"HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
        return _run(export, [*command, *(["--private"] if export.private else [])], staging / "log", environment)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _staging(export: Export) -> Path:
    """An empty folder beside the final place."""
    folder = export.folder.with_name(f".making-{export.pk}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _write_card(export: Export, folder: Path, *, merged: bool) -> None:
    for name, text in card_files(export.checkpoint, merged=merged).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a push: a link to the checkpoint's own
        path.write_text(text, encoding="utf-8")


def _run(export: Export, module: list[str], log: Path, extra: dict[str, str]) -> str:
    """Run a module to its end and follow what it says. Returns the `url` it gives, if any. Raises Failed."""
    base = {name: value for name, value in os.environ.items() if name not in (*NOT_FOR_CHILDREN, processes.MARK)}
    env = base | {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"} | extra
    last: dict[str, object] = {}
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *module], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(export.pk, process, stop), daemon=True, name=f"beat-{export.pk}")
    beat.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                last = json.loads(line)
            except ValueError:  # something a library printed
                continue
            if "text" in last:
                _note(export, str(last["text"]), float(str(last.get("share", 0.0))))
        code = process.wait()
    finally:
        stop.set()
        if process.stdin is not None:
            process.stdin.close()
        process.kill()
        process.wait()
        beat.join()
    if last.get("done") and code == 0:
        return str(last.get("url", ""))
    if "failed" in last:
        raise Failed(str(last["failed"]))
    if code == -9:
        raise Failed(
            "The process was killed (SIGKILL), most often by a machine that ran out of memory; try again later."
        )
    lines = log.read_text(errors="replace").strip().splitlines()
    raise Failed(f"The process ended with code {code}: {lines[-1][:300] if lines else 'it said nothing'}.")


def _beat(pk: int, process: subprocess.Popen[bytes], stop: threading.Event) -> None:
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not stop.wait(HEARTBEAT_S):
            try:
                Export.objects.filter(pk=pk).update(heartbeat_at=Now())
            except (DatabaseError, InterfaceError) as error:
                logger.warning("The database does not answer: %s", error)
                connection.close()
            if time.monotonic() > deadline:
                process.kill()
    finally:
        connection.close()


def _note(export: Export, text: str, share: float) -> None:
    Export.objects.filter(pk=export.pk).update(text=text, share=share, heartbeat_at=Now())


def _conclude(export: Export, state: str, text: str, url: str = "") -> None:
    Export.objects.filter(pk=export.pk, state=Export.State.RUNNING).update(
        state=state, text=text, url=url, share=1.0, size_bytes=export.size_bytes, ended_at=Now()
    )
    checkpoint = export.checkpoint
    what = f"merged weights of step {checkpoint.step}" if export.kind == Export.Kind.MERGE else f"push to {export.repo}"
    if state == Export.State.DONE:
        record(checkpoint.run, "export_done", f"Done: {what}.", actor=export.owner, step=checkpoint.step)
    else:
        record(
            checkpoint.run, "export_failed", f"Not done: {what}. {text}", actor=export.owner, step=checkpoint.step,
            level=Event.Level.WARNING,
        )  # fmt: skip
