"""Which hosts take runs, and what a run would get there now: the one rule of claiming, the form's check, and its picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Prefetch

from webapp.hosts.models import Device, Host
from webapp.hosts.placement import Placement, place


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

    def fit(self, devices: Iterable[Device], servers: int, trainers: int) -> Placement[Device] | None:
        """What of `devices` a run with so many GPUs gets: one CPU slot, or GPU slots; None when they are not enough."""
        devices = list(devices)
        if self.is_cpu:
            return Placement([devices[0]], []) if devices else None
        return place(devices, servers, trainers)


def offers() -> list[Offer]:
    """All hosts, by name. A host without GPUs takes runs only where no host that is up has some."""
    present = Prefetch("devices", Device.objects.filter(present=True).select_related("lease__attempt__run"))
    found = [(host, list(host.devices.all())) for host in Host.objects.prefetch_related(present)]
    open_ = [(host.pk, devices) for host, devices in found if host.alive and not host.drained]
    gpus = any(device.kind == Device.Kind.GPU for _, devices in open_ for device in devices)
    taking = {pk for pk, devices in open_ if devices and (devices[0].kind == Device.Kind.GPU or not gpus)}
    return [Offer(host, devices, host.pk in taking) for host, devices in found]
