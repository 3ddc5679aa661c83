"""Devices and ports that an attempt or a playground server holds. The unique keys of the lease tables are the locks.

An attempt whose trainer is on several hosts holds devices of all of them; those of each further host are its follower's.
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from trainer_core.spec import RunSpec
from webapp.hosts.models import Device as DeviceRow
from webapp.hosts.models import Lease, PortLease
from webapp.hosts.offers import fit as fit_gpus
from webapp.hosts.placement import Placement, gpu_of, trainer_order
from webapp.playground.models import PlaygroundServer
from webapp.runs.models import Attempt, Follower
from workers.devices import DriverFailed, computing_besides
from workers.serving import Device

logger = logging.getLogger(__name__)
Holder = Attempt | PlaygroundServer | Follower
PORTS = range(21000, 24000)
"""Below the range that Linux gives to outgoing connections, so that none of these takes a leased port."""


class NoPort(Exception):
    """Every port of PORTS is leased or in use on this host."""


@dataclass(frozen=True)
class Holding:
    """GPUs of a holder by what they are for, as UUIDs. On a host without GPUs both lists are empty.

    `server_gpus` are those of all its servers, one server's after another's; see `gpus_of`.
    `gpu_share` is the part of a GPU that one slot of it stands for.
    """

    server_gpus: list[str]
    trainer_gpus: list[str]
    gpu_share: float = 1.0

    @property
    def device(self) -> Device:
        return "cuda" if self.server_gpus or self.trainer_gpus else "cpu"

    def gpus_of(self, replica: int, replicas: int) -> list[str]:
        """Those of one of `replicas` servers, counted from 0."""
        each = len(self.server_gpus) // replicas
        return self.server_gpus[replica * each : (replica + 1) * each]

    @property
    def apart(self) -> bool:
        """Whether the trainer's first rank, which sends the weights, has a GPU that no server uses."""
        return not self.trainer_gpus or self.trainer_gpus[0] not in self.server_gpus


def gpus_needed(spec: RunSpec) -> int:
    return spec.resources.server_replicas * spec.resources.rollout_gpus + spec.resources.trainer_gpus


def fit(spec: RunSpec, devices: Iterable[DeviceRow]) -> Placement[DeviceRow] | None:
    """What of free `devices` of one host a run gets: one CPU slot, or GPU slots; None when they are not enough."""
    wanted = spec.resources
    return fit_gpus(devices, wanted.rollout_gpus, wanted.trainer_gpus, wanted.server_replicas)


def fit_server(spec: RunSpec, devices: Iterable[DeviceRow]) -> Placement[DeviceRow] | None:
    """`fit` for one server of the run alone."""
    return fit_gpus(devices, spec.resources.rollout_gpus, 0)


def take(holder: Holder, placement: Placement[DeviceRow]) -> None:
    """Lease devices: all of them, or none.

    Call it inside a transaction. Raises IntegrityError when somebody else holds one of them; then none is taken.
    """
    both = isinstance(holder, Attempt) and not placement.trainer
    server = Lease.Purpose.BOTH if both else Lease.Purpose.SERVER
    for device, replica in zip(placement.server, placement.replica_numbers, strict=True):
        holder.leases.create(device=device, purpose=server, replica=replica)
    for device in placement.trainer:
        holder.leases.create(device=device, purpose=Lease.Purpose.TRAINER)


def take_share(follower: Follower, devices: Sequence[DeviceRow]) -> None:
    """`take` for a further host of an attempt."""
    for device in devices:
        Lease.objects.create(
            device=device, attempt=follower.attempt, follower=follower, purpose=Lease.Purpose.TRAINER
        )  # fmt: skip


def own(holder: Holder) -> QuerySet[Lease]:
    """The leases that the holder itself gives back: of an attempt those of its first host."""
    return holder.leases.filter(follower=None) if isinstance(holder, Attempt) else holder.leases.all()


def holding(holder: Holder) -> Holding:
    """What is held, by server and index of the devices; the trainer's in the order of its ranks."""
    gpus: dict[str, list[str]] = {Lease.Purpose.SERVER: [], Lease.Purpose.TRAINER: []}
    held = own(holder).filter(device__kind=DeviceRow.Kind.GPU).order_by("replica", "device__index")
    for purpose, uuid in held.values_list("purpose", "device__uuid"):
        gpus[purpose].append(gpu_of(uuid))
    server, trainer = gpus[Lease.Purpose.SERVER], gpus[Lease.Purpose.TRAINER]
    present = DeviceRow.objects.filter(host=holder.host, kind=DeviceRow.Kind.GPU, present=True)
    on_host = [gpu_of(uuid) for uuid in present.values_list("uuid", flat=True)]
    slots = max((on_host.count(gpu) for gpu in {*server, *trainer}), default=1)
    return Holding(server, trainer_order(trainer, server), 1 / max(1, slots))


def held_uuids(holder: Holder) -> list[str]:
    """UUIDs of all devices it holds, the CPU slot included."""
    return list(own(holder).values_list("device__uuid", flat=True))


def holders_of(uuids: Iterable[str]) -> set[str]:
    """Ids of the attempts, followers and playground servers that hold a slot on one of these GPUs."""
    gpus = {gpu_of(uuid) for uuid in uuids}
    held = Lease.objects.filter(device__kind=DeviceRow.Kind.GPU)
    found = held.values_list("follower_id", "attempt_id", "playground_id", "device__uuid")
    return {
        str(follower or attempt or playground) for follower, attempt, playground, uuid in found if gpu_of(uuid) in gpus
    }


def busy_gpus(holder: Holder) -> dict[str, list[int]]:
    """Held devices whose GPU somebody computes on, with the pids; all of them when the driver does not say.

    Those that share the GPU may.
    """
    held = held_uuids(holder)
    try:
        found = computing_besides(held, holders_of(held) - {str(holder.pk)})
        return {uuid: pids for uuid in held if (pids := found.get(gpu_of(uuid)))}
    except DriverFailed as error:
        logger.error("The GPUs of %s stay leased, since the driver does not answer: %s", holder, error)
        return {uuid: [] for uuid in held}


def release(holder: Holder, keep: Collection[str] = ()) -> None:
    """Give back ports and devices, but those of the UUIDs in `keep`: a device is not free while a process lives on it."""
    own(holder).exclude(device__uuid__in=keep).delete()
    if not isinstance(holder, Follower):
        holder.ports.all().delete()


def lease_port(holder: Holder, purpose: str) -> int:
    """A TCP port of the holder's host, which is this machine, that nobody listens on and nobody holds.

    Raises NoPort when there is none.
    """
    host = holder.host
    assert host is not None, "a claimed attempt has a host"
    assert not isinstance(holder, Follower), "its ranks choose ports of their own"
    taken = set(PortLease.objects.filter(host=host).values_list("port", flat=True))
    for port in random.sample(PORTS, len(PORTS)):
        if port in taken or not _can_bind(port):
            continue
        try:
            with transaction.atomic():
                holder.ports.create(host=host, port=port, purpose=purpose)
        except IntegrityError:  # another one was faster
            continue
        return port
    raise NoPort(f"No port from {PORTS.start} to {PORTS.stop - 1} is free on {host.name}; end what listens there.")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
