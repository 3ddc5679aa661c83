"""Before anything expensive: check the inputs of an attempt on this host, lay out its folder, find its model."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from trainer_core.rewards.sandbox import score_once
from trainer_core.spec import RunSpec
from webapp.rewards.models import RewardVersion
from webapp.runs.checks import BUILTIN_MODELS, check_host, local_model
from webapp.runs.models import Attempt, Run
from webapp.secrets.services import values_of
from workers import failures, processes

logger = logging.getLogger(__name__)
DOWNLOAD_STALL_S = 300.0
SANDBOX_S = 60.0
INPUTS_LOG = "inputs.log"
"""What the trainer's checks of its inputs said, in the folder of the attempt."""
WEIGHTS = ("*.safetensors", "*.bin")


class CannotStart(Exception):
    """The run can't start on this host; the text is one sentence for its page."""


def prepare_folder(attempt: Attempt, spec: RunSpec) -> None:
    """Write spec.yaml and the reward functions of the run. Raises CannotStart when a reward version is gone."""
    folder = attempt.run.folder
    try:
        (folder / "rewards").mkdir(parents=True, exist_ok=True)
        attempt.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "spec.yaml", spec.to_yaml())
        for reward in spec.rewards:
            if reward.version is not None:
                version = RewardVersion.objects.filter(function__name=reward.name, number=reward.version).first()
                if version is None:
                    raise CannotStart(f"Version {reward.version} of the reward function {reward.name} does not exist.")
                # The name is an identifier by RewardSpec's pattern, so it can't leave the folder.
                write_atomically(folder / "rewards" / f"{reward.name}-v{reward.version}.py", version.source)
    except OSError as error:
        raise CannotStart(
            f"The run folder {folder} can't be written: {error.strerror}; free space or fix its rights."
        ) from error


def check_inputs(attempt: Attempt, spec: RunSpec) -> Path | None:
    """Look again at what the form checked, since it may have changed. Returns the checkpoint to resume from, if any.

    Prompts, rewards and tools are left to the trainer's own checks, which run next. Raises CannotStart with the first problem.
    """
    if problems := check_host(spec, attempt.run.owner):
        raise CannotStart(problems[0].message)
    starting_weights(attempt)
    checkpoint = attempt.resumed_from
    if checkpoint is None:
        return None
    if not checkpoint.folder.is_dir():
        raise CannotStart(
            f"The checkpoint of step {checkpoint.step} is not on this host ({checkpoint.folder} is no folder); resume from "
            "another one."
        )
    return checkpoint.folder


def judge_inputs(attempt: Attempt, returncode: int) -> None:
    """Raises CannotStart when the trainer's own checks (trainer_core.inputs) ended with something else than 0."""
    if returncode == 0:
        return
    log = failures.tail(attempt.folder / INPUTS_LOG)
    lines = failures.last_lines(log, 1)
    if returncode == 1 and lines:
        raise CannotStart(f"{lines[0].rstrip('.')}.")
    raise CannotStart(failures.explain("The check of the inputs", returncode, log))


def starting_weights(attempt: Attempt) -> Path | None:
    """The weights that a forked run begins with; None for other runs. Raises CannotStart when they are not here."""
    run = attempt.run
    if run.forked_step is None:
        return None
    if not run.starting_weights.is_dir():
        raise CannotStart(
            f"The weights of step {run.forked_step} that this run was forked from are not on this host "
            f"({run.starting_weights} is no folder); fork again from a checkpoint that is."
        )
    return run.starting_weights


def run_secrets(run: Run, spec: RunSpec) -> dict[str, str]:
    """The values of the secrets that a run names.

    Raises Missing, and CannotStart where the sandbox of reward functions can't keep them out of the trainer's environment.
    """
    found = values_of(run)
    written = [reward.name for reward in spec.rewards if reward.version is not None]
    if found and written and not sandbox_hides_environment():
        raise CannotStart(
            f"On this host reward functions could read the run's secrets: its kernel offers neither Landlock nor a user of "
            f"their own. Take the secrets or {', '.join(written)} out of the run's settings, or use another host."
        )
    return found


def sandbox_hides_environment() -> bool:
    """Whether a reward function can't look into the environment of the process that started it."""
    level = sandbox_level()
    return "landlock" in level or "own uid" in level


def sandbox_level() -> str:
    """What the sandbox of reward functions is made of on this host."""
    source = "def probe(completions, **columns):\n    return [0.0 for _ in completions]\n"
    call: dict[str, Any] = {"prompts": [[]], "completions": [[]], "completion_ids": [[]]}
    return score_once(source, "probe", [call], SANDBOX_S).level


def find_model(
    spec: RunSpec, folder: Path, tick: Callable[[str], None], secrets: Mapping[str, str] | None = None
) -> Path:
    """The folder of the run's model, downloaded from the hub when it is nowhere on this host.

    `secrets` are the run's: a gated model needs HF_TOKEN. `tick` is called about once a second with a progress sentence, and
    may raise to give up. Raises CannotStart.
    """
    name = spec.model.path
    local = local_model(name)
    if local is None:
        return _from_hub(name, folder, tick, secrets or {})
    if not (local / "config.json").is_file():
        if name in BUILTIN_MODELS:
            raise CannotStart(
                f"The built-in model {name} is not ready on this host yet; `make run` makes it, then resume."
            )
        raise CannotStart(f"The model folder {local} has no config.json; give the folder of a Hugging Face model.")
    if not _has_weights(local):
        raise CannotStart(f"The model folder {local} holds no weights (*.safetensors); download it again.")
    return local.resolve()


def _from_hub(name: str, folder: Path, tick: Callable[[str], None], secrets: Mapping[str, str]) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name):
        raise CannotStart(f"{name!r} is neither a folder on this host nor a hub id such as 'Qwen/Qwen3-0.6B'.")
    if (cached := _cached(name)) is not None:
        return cached
    log = folder / "download.log"
    process = processes.start(
        [sys.executable, "-m", "huggingface_hub.cli.hf", "download", name], env=os.environ | dict(secrets), log=log
    )
    moved, last = time.monotonic(), -1
    try:
        while process.poll() is None:
            size = _cache_size(name)
            moved, last = (time.monotonic(), size) if size != last else (moved, last)
            if time.monotonic() - moved > DOWNLOAD_STALL_S:
                raise CannotStart(f"The download of {name} stands still at {size / 2**30:.1f} GiB.")
            tick(f"Downloads the model {name}: {size / 2**30:.1f} GiB so far.")
    finally:
        processes.end(process, grace_s=5)
    if process.returncode or (cached := _cached(name)) is None:
        lines = failures.last_lines(failures.tail(log), 1)
        raise CannotStart(f"The model {name} is not on this host and could not be downloaded: {' '.join(lines)}")
    return cached


def _cached(name: str) -> Path | None:
    try:
        path = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return path if (path / "config.json").is_file() and _has_weights(path) else None


def _cache_size(name: str) -> int:
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    return sum(file.stat().st_size for file in blobs.glob("*")) if blobs.is_dir() else 0


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file whole or not at all: readers see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
