"""What can be known to be wrong with a spec before a model is loaded. The form, the API and the workers all ask here."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from difflib import get_close_matches
from pathlib import Path

import httpx
from django.conf import settings
from django.core.cache import cache

from trainer_core.rewards import BUILTINS, check_columns
from trainer_core.spec import RunSpec
from webapp.hosts.offers import offers
from webapp.hosts.placement import gpu_of
from webapp.rewards.models import RewardFunction
from webapp.runs.exporters import check_exporters
from webapp.runs.problems import Problem

BUILTIN_MODELS = ("smollm2-135m-instruct",)
"""Models that the set-up puts into MODELS_DIR; named without a folder."""
FILE_SUFFIXES = (".jsonl", ".csv", ".parquet")
HUB_SECONDS = 5.0
"""How long a look at the hub may take while somebody waits for the form."""
LEAST_FREE_GIB = 1.0
"""Disk space without which no run starts: logs, spool and one small adapter."""
GIB = 1024**3


def check_spec(spec: RunSpec) -> list[Problem]:
    """Everything that can be known to be wrong before a model is loaded. Empty when the run may start."""
    return [
        *_check_model(spec),
        *_check_data(spec),
        *_check_rewards(spec),
        *_check_devices(spec),
        *_check_disk(spec),
        *check_exporters(spec),
    ]


def local_model(path: str) -> Path | None:
    """The folder of a built-in or local model, or None when the text can only be a hub id."""
    if path in BUILTIN_MODELS:
        return settings.MODELS_DIR / path
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    return folder if looks_local or folder.is_dir() else None


def _check_model(spec: RunSpec) -> list[Problem]:
    path = spec.model.path
    if path in BUILTIN_MODELS:
        return []
    folder = local_model(path)
    if folder is None:
        return [Problem("model.path", message)] if (message := _hub_problem("model", path)) else []
    if not folder.is_dir():
        return [Problem("model.path", f"There is no folder {folder}; give a folder with a config.json, a hub id, or "
                        f"{' or '.join(BUILTIN_MODELS)}.")]  # fmt: skip
    if not (folder / "config.json").is_file():
        return [Problem("model.path", f"The folder {folder} has no config.json, so it is not a transformers model.")]
    return []


def _hub_problem(kind: str, repo: str) -> str:
    """`_ask_hub`, remembered for a minute: the form asks while somebody types."""
    key = f"hub:{kind}:{hashlib.sha256(repo.encode()).hexdigest()}"
    return cache.get_or_set(key, lambda: _ask_hub(kind, repo) or "", 60) or ""


def _ask_hub(kind: str, repo: str) -> str | None:
    """One sentence when the hub can't give this repository; None when it can, or when it is in the local cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, HFValidationError
    from huggingface_hub.utils import build_hf_headers, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        return f"{repo!r} is neither a path on this machine nor a hub id such as 'Qwen/Qwen3-0.6B'."
    try:
        if any(cached.repo_id == repo and cached.repo_type == kind for cached in scan_cache_dir().repos):
            return None
    except CacheNotFound:
        pass  # nothing was ever downloaded here
    instead = (
        f"a local folder, or {BUILTIN_MODELS[0]!r}" if kind == "model" else "a local file, or 'reasoning_gym:<task>'"
    )
    offline = f"The hub can't be reached from this machine and {repo!r} is not in its cache; give {instead}."
    if constants.HF_HUB_OFFLINE:
        return offline
    url = f"{constants.ENDPOINT}/api/{kind}s/{repo}"
    try:
        status = httpx.get(url, headers=build_hf_headers(), timeout=HUB_SECONDS, follow_redirects=True).status_code
    except (httpx.HTTPError, OSError):
        return offline
    if status in (401, 403, 404):
        return f"The hub has no {kind} {repo!r}, or it is private and no token is set."
    return None if status < 400 else f"The hub answered {status} when asked for {repo!r}; try again later."


def _check_data(spec: RunSpec) -> list[Problem]:
    source = spec.data.source
    if source.startswith("reasoning_gym:"):
        return _check_reasoning_gym(source.partition(":")[2], spec)
    if spec.data.options:
        return [
            Problem("data.options", "Generator options are only for 'reasoning_gym:<task>' datasets; leave them empty.")
        ]
    if source.endswith(FILE_SUFFIXES):
        return _check_file(Path(source).expanduser(), spec)
    if source.startswith(("/", ".", "~")):
        found = Path(source).suffix or "no ending"
        return [Problem("data.source", f"A local dataset ends in {', '.join(FILE_SUFFIXES)}; found {found}.")]
    return [Problem("data.source", message)] if (message := _hub_problem("dataset", source)) else []


def _check_reasoning_gym(task: str, spec: RunSpec) -> list[Problem]:
    import reasoning_gym  # takes a second; only when a spec is checked
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = _nearest(task, list(DATASETS))
        return [Problem("data.source", f"reasoning-gym has no task {task!r}{near}.")]
    allowed = [name for name in DATASETS[task][1].__dataclass_fields__ if name not in ("seed", "size")]
    if unknown := sorted(set(spec.data.options) - set(allowed)):
        return [
            Problem(
                "data.options", f"{task} has no option {', '.join(unknown)}; it has {', '.join(allowed) or 'none'}."
            )
        ]
    try:
        dataset = reasoning_gym.create_dataset(
            task, size=min(spec.data.size, 8), seed=spec.data.seed, **spec.data.options
        )
        dataset[0]
    except (AssertionError, TypeError, ValueError, KeyError, IndexError) as error:
        return [Problem("data.options", f"{task} does not accept these options: {error or type(error).__name__}.")]
    return []


def _nearest(word: str, words: list[str]) -> str:
    near = get_close_matches(word, words, n=3, cutoff=0.5)
    return (
        f"; the closest are {', '.join(near)}"
        if near
        else f"; it has {len(words)} tasks, such as {', '.join(words[1:4])}"
    )


def _check_file(path: Path, spec: RunSpec) -> list[Problem]:
    if not path.is_file():
        return [Problem("data.source", f"There is no file {path} on this machine.")]
    try:
        columns = file_columns(path)
    except (ValueError, OSError) as error:
        return [Problem("data.source", f"{path} can't be read: {error}.")]
    if "prompt" not in columns:
        found = ", ".join(columns) or "none"
        return [Problem("data.source", f"{path.name} has no 'prompt' column; its columns are: {found}.")]
    try:
        check_columns([reward.name for reward in spec.rewards], columns)
    except ValueError as error:
        return [Problem("rewards", f"The {error}.")]
    return []


def file_columns(path: Path) -> list[str]:
    """Column names of a .jsonl, .csv or .parquet file, from its beginning. Raises ValueError or OSError."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return list(pyarrow.parquet.read_schema(path).names)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"not a Parquet file ({str(error).splitlines()[0].rstrip('.')})") from error
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return next(csv.reader(file), [])
        line = next((line for line in file if line.strip()), "")
    if not line:
        raise ValueError("it is empty")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"its first line is not JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise ValueError(f"its first line is a JSON {type(row).__name__}; an object with a 'prompt' key is needed")
    return list(row)


def _check_rewards(spec: RunSpec) -> list[Problem]:
    problems = []
    wanted = [reward.name for reward in spec.rewards if reward.name not in BUILTINS]
    own: dict[str, list[int]] = {
        function.name: sorted(version.number for version in function.versions.all())
        for function in RewardFunction.objects.filter(name__in=wanted).prefetch_related("versions")
    }
    for index, reward in enumerate(spec.rewards):
        field = f"rewards.{index}"
        if reward.name in BUILTINS:
            if reward.version is not None:
                problems.append(
                    Problem(f"{field}.version", f"{reward.name} is built in and has no versions; leave it empty.")
                )
        elif reward.name not in own:
            every = [*BUILTINS, *RewardFunction.objects.filter(archived=False).values_list("name", flat=True)]
            problems.append(
                Problem(f"{field}.name", f"There is no reward function {reward.name!r}; there are {', '.join(every)}.")
            )
        elif reward.version is not None and reward.version not in own[reward.name]:
            there = ", ".join(map(str, own[reward.name]))
            problems.append(
                Problem(f"{field}.version", f"{reward.name} has no version {reward.version}; its versions are {there}.")
            )
    if not spec.agent.environment and all(reward.weight == 0 for reward in spec.rewards):
        problems.append(
            Problem("rewards", "All rewards have weight 0, so there is nothing to learn; give one a weight.")
        )
    return problems


def _check_devices(spec: RunSpec) -> list[Problem]:
    """Looked at are the hosts that take runs, or all of them while none is up. No host at all is no problem: the run waits
    for one, and its page says so.
    """
    wanted = spec.resources.rollout_gpus, spec.resources.trainer_gpus
    known = offers()
    asked = [offer for offer in known if offer.takes_runs] or known
    if not asked or any(offer.fit(offer.devices, *wanted) for offer in asked):
        return []
    found = ", ".join(
        f"{offer.host.name} has {len({gpu_of(device.uuid) for device in offer.devices})}" for offer in asked
    )
    return [Problem("resources", f"{sum(wanted)} GPUs of one host are needed ({wanted[0]} for rollouts, {wanted[1]} for "
                    f"training), but {found}.")]  # fmt: skip


def _check_disk(spec: RunSpec) -> list[Problem]:
    folder = next(path for path in (settings.RUNS_DIR, *settings.RUNS_DIR.parents) if path.exists())
    free = shutil.disk_usage(folder).free / GIB
    needed = LEAST_FREE_GIB + _checkpoints_gib(spec)
    if free >= needed:
        return []
    return [Problem("checkpoints", f"The disk has {free:.1f} GiB free where about {needed:.1f} GiB are needed for logs "
                    "and checkpoints; free some, save less often, or keep fewer checkpoints.")]  # fmt: skip


def _checkpoints_gib(spec: RunSpec) -> float:
    """Weights and AdamW state of the checkpoints kept, where the weights' size is known; an adapter is small."""
    folder = local_model(spec.model.path)
    if spec.lora.enabled or folder is None or not folder.is_dir():
        return 0.0
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    count = spec.training.max_steps // spec.checkpoints.save_steps + 1
    return 3 * weights * min(count, spec.checkpoints.save_total_limit or count) / GIB
