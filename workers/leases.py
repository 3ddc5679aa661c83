"""Devices and ports that an attempt holds. The unique keys of the lease tables are the locks."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from django.db import IntegrityError, transaction

from trainer_core.spec import RunSpec
from webapp.hosts.models import Device as DeviceRow
from webapp.hosts.models import Lease, PortLease
from webapp.runs.models import Attempt
from workers.devices import DriverFailed, computing_on
from workers.serving import Device

logger = logging.getLogger(__name__)
PORTS = range(21000, 24000)
"""Below the range that Linux gives to outgoing connections, so that none of these takes a leased port."""


class NoPort(Exception):
    """Every port of PORTS is leased or in use on this host."""


@dataclass(frozen=True)
class Holding:
    """Devices of an attempt by what they are for, as UUIDs. On a host without GPUs both lists are empty."""

    server_gpus: list[str]
    trainer_gpus: list[str]

    @property
    def device(self) -> Device:
        return "cuda" if self.server_gpus else "cpu"


def gpus_needed(spec: RunSpec) -> int:
    return spec.resources.rollout_gpus + spec.resources.trainer_gpus


def take(attempt: Attempt, spec: RunSpec, devices: Iterable[DeviceRow]) -> None:
    """Lease `devices` for an attempt: the CPU slot, or GPUs, the server's first.

    Call it inside a transaction. Raises IntegrityError when somebody else holds one of them; then none is taken.
    """
    devices = list(devices)
    if devices[0].kind == DeviceRow.Kind.CPU:
        purposes = [Lease.Purpose.BOTH]
    else:
        purposes = [Lease.Purpose.SERVER] * spec.resources.rollout_gpus
        purposes += [Lease.Purpose.TRAINER] * spec.resources.trainer_gpus
    Lease.objects.bulk_create(
        Lease(device=device, attempt=attempt, purpose=purpose)
        for device, purpose in zip(devices, purposes, strict=True)
    )


def holding(attempt: Attempt) -> Holding:
    """What the attempt holds, in the order of the devices' indices."""
    gpus: dict[str, list[str]] = {Lease.Purpose.SERVER: [], Lease.Purpose.TRAINER: []}
    held = attempt.leases.filter(device__kind=DeviceRow.Kind.GPU).order_by("device__index")
    for purpose, uuid in held.values_list("purpose", "device__uuid"):
        gpus[purpose].append(uuid)
    return Holding(gpus[Lease.Purpose.SERVER], gpus[Lease.Purpose.TRAINER])


def held_uuids(attempt: Attempt) -> list[str]:
    """UUIDs of all devices the attempt holds, the CPU slot included."""
    return list(attempt.leases.values_list("device__uuid", flat=True))


def busy_gpus(attempt: Attempt) -> dict[str, list[int]]:
    """GPUs that the attempt holds and some process computes on, with the pids; all of them when the driver does not say."""
    held = held_uuids(attempt)
    try:
        return {uuid: pids for uuid, pids in computing_on(held).items() if pids}
    except DriverFailed as error:
        logger.error("The GPUs of %s stay leased, since the driver does not answer: %s", attempt, error)
        return {uuid: [] for uuid in held}


def release(attempt: Attempt, keep: Collection[str] = ()) -> None:
    """Give back ports and devices, but those of the UUIDs in `keep`: a device is not free while a process lives on it."""
    attempt.leases.exclude(device__uuid__in=keep).delete()
    attempt.ports.all().delete()


def lease_port(attempt: Attempt, purpose: str) -> int:
    """A TCP port of the attempt's host, which is this machine, that nobody listens on and no attempt holds.

    Raises NoPort when there is none.
    """
    host = attempt.host
    assert host is not None, "a claimed attempt has a host"
    taken = set(PortLease.objects.filter(host=host).values_list("port", flat=True))
    for port in random.sample(PORTS, len(PORTS)):
        if port in taken or not _can_bind(port):
            continue
        try:
            with transaction.atomic():
                PortLease.objects.create(host=host, port=port, attempt=attempt, purpose=purpose)
        except IntegrityError:  # another attempt was faster
            continue
        return port
    raise NoPort(f"No port from {PORTS.start} to {PORTS.stop - 1} is free on {host.name}; end what listens there.")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
