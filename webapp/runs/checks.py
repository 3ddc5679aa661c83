"""What can be known to be wrong with a spec before a model is loaded. The form, the API and the workers all ask here."""

from __future__ import annotations

import shutil
from pathlib import Path

from django.conf import settings

from trainer_core.rewards import BUILTINS
from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.hosts.offers import fit, offers, others_take_runs
from webapp.hosts.placement import gpu_of
from webapp.hosts.spreading import beside
from webapp.rewards.models import RewardFunction
from webapp.runs import hub
from webapp.runs.data_checks import check_data, datasets_of, is_on_hub
from webapp.runs.exporters import check_exporters
from webapp.runs.peeking import Agent, Peeked, peek
from webapp.runs.problems import Problem
from webapp.secrets.services import Missing, values

BUILTIN_MODELS = ("smollm2-135m-instruct",)
"""Models that the set-up puts into MODELS_DIR; named without a folder."""
LEAST_FREE_GIB = 1.0
"""Disk space without which no run starts: logs, spool and one small adapter."""
GIB = 1024**3


def check_spec(spec: RunSpec, owner: User | None) -> list[Problem]:
    """Everything that can be known to be wrong before a model is loaded. Empty when the run may start.

    `owner` is who the run belongs or will belong to; the hub is asked with their token, where the run names it.
    """
    return examine(spec, owner)[0]


def examine(spec: RunSpec, owner: User | None) -> tuple[list[Problem], Peeked]:
    """`check_spec`, and what was seen of hub datasets on the way."""
    access = hub.access_of(spec, owner)
    found = [
        *_check_secrets(spec, owner),
        *_check_model(spec, access),
        *check_data(spec, access),
        *_check_rewards(spec),
        *_check_devices(spec),
        *_check_disk(spec),
        *check_exporters(spec),
    ]
    inside = _look_inside(spec, access, found)
    return [*found, *inside.problems], inside


def check_host(spec: RunSpec, owner: User) -> list[Problem]:
    """The same on the run's host at its start, without what the trainer's own checks say there: data, rewards and tools."""
    found = [*_check_model(spec, hub.access_of(spec, owner)), *_check_devices(spec), *_check_disk(spec)]
    return [*found, *check_exporters(spec)]


def local_model(path: str) -> Path | None:
    """The folder of a built-in or local model, or None when the text can only be a hub id."""
    if path in BUILTIN_MODELS:
        return settings.MODELS_DIR / path
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    return folder if looks_local or folder.is_dir() else None


def _check_model(spec: RunSpec, access: hub.Access) -> list[Problem]:
    path = spec.model.path
    if path in BUILTIN_MODELS:
        return []
    folder = local_model(path)
    if folder is None:
        return [Problem("model.path", message)] if (message := hub.problem("model", path, access)) else []
    if not folder.is_dir():
        return [Problem("model.path", f"There is no folder {folder}; give a folder with a config.json, a hub id, or "
                        f"{' or '.join(BUILTIN_MODELS)}.")]  # fmt: skip
    if not (folder / "config.json").is_file():
        return [Problem("model.path", f"The folder {folder} has no config.json, so it is not a transformers model.")]
    return []


def _check_secrets(spec: RunSpec, owner: User | None) -> list[Problem]:
    try:
        if owner is not None:
            values(spec.secrets, owner)
    except Missing as error:
        return [Problem("secrets", str(error))]
    return []


def _look_inside(spec: RunSpec, access: hub.Access, found: list[Problem]) -> Peeked:
    """A look into the hub datasets that have no problem among those `found`, and at tools and environment."""
    wrong = {problem.field.partition(".")[0] for problem in found}
    sections = [name for name, data in datasets_of(spec).items() if is_on_hub(data) and name not in wrong]
    agent: Agent = "none"
    if spec.agent.tools or spec.agent.environment:
        # What is installed, and which modules are allowed, another machine knows only of itself.
        agent = "builtin" if others_take_runs() else "all"
    return peek(spec, access, [*sections], agent)


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
    servers, each, trainers = spec.resources.server_replicas, spec.resources.rollout_gpus, spec.resources.trainer_gpus
    known = offers()
    asked = [offer for offer in known if offer.takes_runs] or known
    if not asked or any(
        fit(offer.devices, each, trainers, servers) and beside(spec.resources, offer, asked, now=False) is not None
        for offer in asked
    ):
        return []
    found = ", ".join(
        f"{offer.host.name} has {len({gpu_of(device.uuid) for device in offer.devices})}" for offer in asked
    )
    rollouts = f"{each}" if servers == 1 else f"{servers} servers x {each}"
    lead = servers * each + trainers
    if (hosts := spec.resources.trainer_hosts) > 1:
        return [Problem("resources", f"{hosts} hosts are needed, with {lead} GPUs on one for rollouts and training and "
                        f"{trainers} on each other, or a CPU slot on each, but {found}.")]  # fmt: skip
    return [Problem("resources", f"{lead} GPUs of one host are needed ({rollouts} for rollouts, {trainers} for "
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
