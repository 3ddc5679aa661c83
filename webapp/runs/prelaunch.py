"""What the form says before a launch: memory against devices, where the run would go now, and what will wait for what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_core.spec import RunSpec
from webapp.hosts.offers import Offer, fit, offers
from webapp.hosts.spreading import Share, beside
from webapp.runs import hub, memory, precision
from webapp.runs.checks import local_model
from webapp.runs.models import Run, State

MIB = 1024**2
PROMPT_GUESS = 512
"""Tokens of a prompt where none could be counted yet; the context bounds it."""
TIGHT = 0.9
"""A device filled beyond this share of its memory may not do: the estimate is good to about a tenth."""
SERVER = "vLLM server"
TITLES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer state", "activations": "activations",
    "working": "logits and copies", "cache": "KV cache", "process": "the process itself",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the run would go. `offer` is None when no host takes runs; `now` says that its devices are free.

    `further` are the other hosts of a trainer on several.
    `servers` has for each device that generates the number of its server, None where there is only one.
    """

    offer: Offer | None
    now: bool
    servers: Mapping[int, int | None] = field(default_factory=dict)
    trainers: frozenset[int] = frozenset()
    further: tuple[Share, ...] = ()

    @property
    def names(self) -> list[str]:
        """Its hosts, the first one first."""
        return [] if self.offer is None else [self.offer.host.name, *(share.host.name for share in self.further)]


def before_launch(spec: RunSpec, prompt_tokens: int | None, access: hub.Access = hub.Access()) -> dict[str, Any]:
    """Everything as JSON: `memory` (a table, or `sentence` alone), `hosts` (a picture), `waits` (sentences)."""
    found = offers()
    place = _place(spec, found)
    return {
        "memory": _memory(spec, place, found, prompt_tokens, access),
        "hosts": [_picture(offer, place) for offer in found],
        "waits": [
            text
            for text in (_start(place, spec, found), _pace(spec, place), precision.warning(spec, place.offer))
            if text
        ],
    }


def _place(spec: RunSpec, found: list[Offer]) -> Place:
    """The first host with room now; else the first that would have room if it were empty."""
    resources = spec.resources
    taking = [offer for offer in found if offer.takes_runs]
    for now in (True, False):
        for offer in taking:
            devices = offer.free if now else offer.devices
            placement = fit(devices, resources.rollout_gpus, resources.trainer_gpus, resources.server_replicas)
            further = beside(resources, offer, taking, now=now)
            if placement is not None and further is not None:
                pairs = zip(placement.server, placement.replica_numbers, strict=True)
                servers = {device.pk: number for device, number in pairs}
                trainers = frozenset(device.pk for device in placement.trainer) or frozenset(servers)
                theirs = frozenset(device.pk for share in further for device in share.devices)
                return Place(offer, now, servers, trainers | theirs, tuple(further))
    return Place(None, False)


def _picture(offer: Offer, place: Place) -> dict[str, Any]:
    chosen = offer.host.name in place.names
    devices = []
    for device in offer.devices:
        roles: list[str] = []
        if chosen and device.pk in place.servers:
            roles.append("server")
        if chosen and device.pk in place.trainers:
            roles.append("trainer")
        lease = getattr(device, "lease", None)
        devices.append({
            "index": device.index, "name": device.name, "kind": device.kind, "gib": round(device.memory_mib / 1024),
            "run": None if lease is None else lease.holder.run.name, "roles": roles,
            "server": place.servers.get(device.pk) if "server" in roles else None,
        })  # fmt: skip
    host = offer.host
    state = (
        ""
        if offer.takes_runs
        else "does not report"
        if not host.alive
        else "drained"
        if host.drained
        else "no run goes here"
    )
    return {"name": host.name, "state": state, "chosen": chosen, "devices": devices}


def _start(place: Place, spec: RunSpec, found: list[Offer]) -> str:
    if place.offer is None:
        several = spec.resources.trainer_hosts > 1
        who = "No hosts that take runs have" if several else "No host that takes runs has"
        until = "they report" if several else "one reports"
        return f"{who} enough devices, so the run will wait in the queue until {until}."
    ahead = Run.objects.filter(state=State.QUEUED).count()
    queue = f", behind {ahead} that wait already" if ahead else ""
    name = " and ".join(place.names)
    what = _devices(place.offer, spec)
    if place.now and not ahead:
        return f"Starts at once on {name}, with {what}."
    chosen = [offer for offer in found if offer.host.name in place.names]
    held = sorted({device.lease.held_by for offer in chosen for device in offer.devices if hasattr(device, "lease")})
    by = f", held by {', '.join(held[:3])}{' and others' if len(held) > 3 else ''}" if held and not place.now else ""
    return f"Waits for {what} of {name}{by}{queue}."


def _devices(offer: Offer, spec: RunSpec) -> str:
    servers, each, trainers = spec.resources.server_replicas, spec.resources.rollout_gpus, spec.resources.trainer_gpus
    several_hosts = spec.resources.trainer_hosts > 1
    if offer.is_cpu:
        return f"the CPU slot{'s' * several_hosts}" + (f" for {servers} servers and the trainer" if servers > 1 else "")
    gpus = servers * each
    of_servers = f" ({servers} servers of {each})" if servers > 1 else ""
    on_each = " on each" if several_hosts else ""
    return f"{gpus} GPU{'s' * (gpus > 1)} to generate{of_servers} and {trainers} to train{on_each}"


def _pace(spec: RunSpec, place: Place) -> str:
    """Which side waits for which, as docs/trainer.md has it."""
    samples, staleness = spec.samples_per_step, spec.rollout.max_staleness
    ahead = spec.rollout.max_concurrent_rollouts or max(staleness, 1) * samples
    shared = " Both share the cores, so each slows the other." if place.offer is not None and place.offer.is_cpu else ""
    if staleness == 0:
        return f"Each side waits for the other: {samples} samples, one step, new weights, and again (max staleness 0).{shared}"
    return (
        f"The trainer waits for {samples} samples a step; generation runs on meanwhile, up to {ahead} rollouts ahead, and "
        f"waits when samples would become older than {staleness} update{'s' * (staleness > 1)}.{shared}"
    )


def _memory(
    spec: RunSpec, place: Place, found: list[Offer], prompt_tokens: int | None, access: hub.Access
) -> dict[str, Any]:
    config = model_config(spec, access)
    if config is None:
        return {"rows": [], "sentence": "Memory can't be estimated: the model's config.json is not at hand."}
    shape = memory.shape_of(config)
    if shape is None:
        known = ", ".join(memory.ARCHITECTURES)
        kind = config.get("model_type", "nothing")
        return {
            "rows": [],
            "sentence": f"Memory can't be estimated: the model is a {kind!s:.40}; the trainer knows {known}.",
        }
    room = spec.server.max_model_len - spec.rollout.max_completion_length
    row = memory.largest_row(spec, min(room, prompt_tokens or PROMPT_GUESS))
    cpu = place.offer is None or place.offer.is_cpu
    device: memory.Device = "cpu" if cpu else "cuda"
    need = memory.trainer(spec, shape, row, device, ranks=spec.resources.ranks(on_cpu=cpu))
    sizes = {item.pk: item.memory_mib * MIB for offer in found for item in offer.devices}
    smallest = min((sizes[pk] for pk in place.trainers), default=None)
    at_server = min((sizes[pk] for pk in place.servers), default=None)
    if cpu:
        mine = need.parts | {"process": memory.PROCESS_BYTES["trainer"]}
        parts = {"Trainer": {name: size * spec.resources.cpu_ranks for name, size in mine.items()}}
        server = memory.server(spec, shape, device).parts | {"process": memory.PROCESS_BYTES["server"]}
        parts[SERVER] = {name: size * spec.resources.server_replicas for name, size in server.items()}
        capacity = {"both": (sum(sum(one.values()) for one in parts.values()), smallest)}
    else:
        parts = {"Trainer": need.parts, SERVER: memory.server(spec, shape, device, at_server).parts}
        capacity = {name: (sum(parts[name].values()), size) for name, size in
                    (("Trainer", smallest), (SERVER, at_server))}  # fmt: skip
    rows = [
        {
            "title": _title(title, spec, cpu),
            "bytes": sum(one.values()),
            "parts": [[TITLES[name], size] for name, size in one.items() if size],
        }
        for title, one in parts.items()
    ]
    return {
        "rows": rows,
        "row_tokens": row.tokens,
        "sentence": _verdict(capacity, cpu, spec),
        "tight": _tight(capacity),
    }


def _title(name: str, spec: RunSpec, cpu: bool) -> str:
    """On a CPU the row is that of all servers together, on GPUs that of one GPU."""
    servers = spec.resources.server_replicas
    return name if name != SERVER or servers == 1 else f"{servers} {SERVER}s together" if cpu else f"Each {SERVER}"


def _tight(capacity: dict[str, tuple[int, int | None]]) -> bool:
    """Whether something may not fit. A server takes all it may, so it is too large only beyond its whole device."""
    return any(
        size is not None and needed > (1.0 if name == SERVER else TIGHT) * size
        for name, (needed, size) in capacity.items()
    )


def _verdict(capacity: dict[str, tuple[int, int | None]], cpu: bool, spec: RunSpec) -> str:
    """One sentence; what is too large names the knobs."""
    several = cpu and spec.resources.server_replicas > 1
    fewer = "fewer servers, " if several else ""
    knobs = f"{fewer}a smaller token budget or batch, gradient checkpointing, LoRA, or bfloat16 weights need less"
    at_server, of_server = capacity.get(SERVER, (0, None))
    if of_server is not None and at_server > of_server:
        less = "more GPUs a server, a shorter context or a smaller KV cache need less"
        return f"The server would need about {_gib(at_server)}, but the memory of a GPU is {_gib(of_server)}: {less}."
    name = "both" if cpu else "Trainer"
    needed, size = capacity[name]
    who = f"Server{'s' * several} and trainer together" if cpu else "The trainer"
    where = "of the host" if cpu else "of a GPU"
    if size is None:
        return f"{who} need{'' if cpu else 's'} about {_gib(needed)}; no host offers a device yet."
    if needed > size:
        return f"{who} would need about {_gib(needed)}, but the memory {where} is {_gib(size)}: {knobs}."
    if needed > TIGHT * size:
        return f"{who} would fill about {_gib(needed)} of {_gib(size)} {where}, which may not do: {knobs}."
    return f"{who} need{'' if cpu else 's'} about {_gib(needed)} of {_gib(size)} {where}."


def _gib(size: int) -> str:
    return f"{size / memory.GIB:.1f} GiB"


def model_config(spec: RunSpec, access: hub.Access) -> dict[str, Any] | None:
    """The model's config.json: from its folder, the hub's cache on this machine, or the hub; None when none has it."""
    folder = local_model(spec.model.path)
    if folder is None:
        return hub.model_config(spec.model.path, access)
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
