"""The further hosts of a trainer that is spread over several: which give it devices, with all of them or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer_core.spec.serving import ResourceSpec
from webapp.hosts.models import Device, Host
from webapp.hosts.offers import Offer, fit


@dataclass(frozen=True)
class Share:
    """The devices of one host that are the trainer's alone: GPU slots, or a CPU slot."""

    host: Host
    devices: list[Device]


def shares(
    resources: ResourceSpec, lead: Sequence[Device], others: Iterable[tuple[Host, Sequence[Device]]]
) -> list[Share] | None:
    """What `others` give beside the host with the devices `lead`, in their order; None when too few of them can.

    A trainer is on GPUs everywhere, or nowhere.
    """
    wanted = resources.trainer_hosts - 1
    found: list[Share] = []
    for host, devices in others:
        if len(found) < wanted and devices and devices[0].kind == lead[0].kind:
            placement = fit(devices, 0, resources.trainer_gpus)
            if placement is not None:
                found.append(Share(host, placement.slots))
    return found if len(found) == wanted else None


def beside(resources: ResourceSpec, lead: Offer, known: Iterable[Offer], *, now: bool) -> list[Share] | None:
    """`shares` of the other offers: of what is free `now`, or of all they have."""
    others = [(offer.host, offer.free if now else offer.devices) for offer in known if offer.host != lead.host]
    return shares(resources, lead.devices, others)
