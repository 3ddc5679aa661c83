"""Which hosts take runs, and what a run would get there now: the one rule of claiming, the form's check, and its picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db.models import Prefetch
from django.utils import timezone

from webapp.hosts.models import ALIVE_FOR, Device, Host, host_name
from webapp.hosts.placement import Placement, place

HOLDERS = ("lease__attempt__run", "lease__playground__run")
"""What `Lease.held_by` reads, from a device."""


@dataclass(frozen=True)
class Offer:
    """A host's present devices. `takes_runs`: it is alive, not drained, and does not leave runs to hosts with GPUs."""

    host: Host
    devices: list[Device]
    takes_runs: bool

    @property
    def is_cpu(self) -> bool:
        return bool(self.devices) and self.devices[0].kind == Device.Kind.CPU

    @property
    def free(self) -> list[Device]:
        return [device for device in self.devices if not hasattr(device, "lease")]


def fit(devices: Iterable[Device], servers: int, trainers: int, replicas: int = 1) -> Placement[Device] | None:
    """What of free `devices` of one host so many GPUs are: one CPU slot, whatever the numbers, or GPU slots (see `place`);
    None when they are not enough.
    """
    devices = list(devices)
    if devices and devices[0].kind == Device.Kind.CPU:
        return Placement([devices[0]], [])
    return place(devices, servers, trainers, replicas)


def offers() -> list[Offer]:
    """All hosts, by name."""
    present = Prefetch("devices", Device.objects.filter(present=True).select_related(*HOLDERS))
    hosts = [(host, list(host.devices.all())) for host in Host.objects.prefetch_related(present)]
    gpus_up = gpus_are_up()
    return [Offer(host, devices, host.alive and takes_runs(host, devices, gpus_up)) for host, devices in hosts]


def others_take_runs() -> bool:
    """Whether a run may go to another machine than this one."""
    return any(offer.takes_runs and offer.host.name != host_name() for offer in offers())


def takes_runs(host: Host, devices: Sequence[Device], gpus_up: bool) -> bool:
    """Whether a host that is up takes runs: not when drained, and without GPUs only where no host that is up has some."""
    has_gpus = any(device.kind == Device.Kind.GPU for device in devices)
    return bool(devices) and not host.drained and (has_gpus or not gpus_up)


def gpus_are_up() -> bool:
    """Whether a host that is up and not drained has a GPU."""
    since = timezone.now() - ALIVE_FOR
    return Device.objects.filter(
        kind=Device.Kind.GPU, present=True, host__drained=False, host__last_seen_at__gt=since
    ).exists()
