"""Which hosts a run gets that wants several, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models import Q
from django.utils import timezone

from trainer_core.spec import RunSpec
from webapp.hosts.models import ALIVE_FOR, Device, Host
from webapp.hosts.offers import Offer, offers
from webapp.hosts.spreading import shares
from webapp.runs.models import Run, State
from workers import leases


def lock_hosts(own: str) -> tuple[Host, list[Offer]]:
    """This host, locked until the transaction ends, and what the others that take runs offer: where a queued run wants several
    hosts, and locked then as well.

    All locks are taken at once, in one order, so that two claimers never wait for one another.
    """
    wanted = Q(name=own)
    if Run.objects.filter(state=State.QUEUED, spec__resources__trainer_hosts__gt=1).exists():
        wanted |= Q(last_seen_at__gt=timezone.now() - ALIVE_FOR)
    locked = {host.name: host for host in Host.objects.select_for_update().filter(wanted).order_by("pk")}
    host = locked.pop(own)
    return host, [offer for offer in other_hosts(host) if offer.host.name in locked] if locked else []


def other_hosts(host: Host) -> list[Offer]:
    """What the hosts that take runs besides this one offer."""
    return [offer for offer in offers() if offer.takes_runs and offer.host != host]


def fits(spec: RunSpec, host: Host, present: list[Device], others: list[Offer]) -> bool:
    """Whether a run is for this host: it can lead it, or, of a run over several hosts, have a share in it, once devices are
    free. Then later runs wait for it."""
    if spec.resources.trainer_hosts == 1:
        return leases.fit(spec, present) is not None
    hosts = [(host, present), *((offer.host, offer.devices) for offer in others)]
    return any(
        leases.fit(spec, lead) is not None
        and (found := shares(spec.resources, lead, [pair for pair in hosts if pair[0] != leader])) is not None
        and host in (leader, *(share.host for share in found))
        for leader, lead in hosts
    )


def waits_for_hosts(spec: RunSpec, hosts: Sequence[Host], ahead: Run | None) -> str:
    """Why a queued run over several of `hosts`, which are up and not drained, has not begun. The same on every host."""
    wanted = spec.resources
    present = {host: [device for device in host.devices.all() if device.present] for host in hosts}
    on_gpus = any(device.kind == Device.Kind.GPU for devices in present.values() for device in devices)
    kind = Device.Kind.GPU if on_gpus else Device.Kind.CPU
    have = {host: [device for device in devices if device.kind == kind] for host, devices in present.items()}
    free = {host: [device for device in devices if not hasattr(device, "lease")] for host, devices in have.items()}
    if ahead is not None and any(fits(spec, host, free[host], _offers(free, host)) for host in free):
        return f"Waits for its turn behind run {ahead.name}."
    counts = ", ".join(f"host {host.name} has {len(free[host])} free of {len(have[host])}" for host in have)
    if not on_gpus:
        return f"Waits for the CPU slots of {wanted.trainer_hosts} hosts; {counts}."
    return (
        f"Waits for {wanted.trainer_hosts} hosts, {leases.gpus_needed(spec)} GPUs of one and {wanted.trainer_gpus} of each "
        f"other; {counts}."
    )


def _offers(devices: dict[Host, list[Device]], host: Host) -> list[Offer]:
    return [Offer(other, found, True) for other, found in devices.items() if other != host]
