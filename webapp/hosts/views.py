"""Hosts: devices, who holds them, and what waits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from django.contrib import messages
from django.db import transaction
from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.views.decorators.http import require_POST, require_safe

from webapp.audit import log
from webapp.fragments import unless_seen
from webapp.hosts.models import Device, Host
from webapp.hosts.offers import HOLDERS
from webapp.hosts.placement import gpu_of
from webapp.runs.models import Run, State


@require_safe
def hosts(request: HttpRequest) -> HttpResponse:
    devices = Device.objects.select_related(*(f"{name}__owner" for name in HOLDERS)).order_by("kind", "index", "uuid")
    queue = Run.objects.filter(state=State.QUEUED).select_related("owner").order_by("queued_at")
    found = list(Host.objects.prefetch_related(Prefetch("devices", devices)))
    present = [device for host in found for device in host.devices.all() if device.present]
    context = {
        "hosts": [(host, _shown(host), any(device.kind == Device.Kind.GPU for device in host.devices.all())) for host in found],
        "queue": queue, "present": len(present),
        "busy": sum(1 for device in present if hasattr(device, "lease")),
    }  # fmt: skip
    if request.GET.get("fragment"):
        return unless_seen(request, render_to_string("hosts/fragment.html", context, request=request))
    return render(request, "hosts/list.html", context)


@dataclass(frozen=True)
class Shown:
    """A device in the table. Readings stand beside a GPU's first slot and span the others: `slots` is 0 for those.

    `memory_mib` is that of the whole GPU; `told`: its readings are of now.
    """

    device: Device
    slots: int
    memory_mib: int
    told: bool


def _shown(host: Host) -> list[Shown]:
    slots: dict[str, list[Device]] = defaultdict(list)
    for device in host.devices.all():
        slots[gpu_of(device.uuid)].append(device)
    return [
        Shown(device, 0 if at else len(group), sum(slot.memory_mib for slot in group if slot.present),
              host.alive and device.present)
        for group in slots.values() for at, device in enumerate(group)
    ]  # fmt: skip


@require_POST
def drain(request: HttpRequest, host_id: int) -> HttpResponse:
    """Stop or allow new runs on a host; what runs there goes on. For admins."""
    host = get_object_or_404(Host, pk=host_id)
    drained = request.POST.get("drained") == "1"
    with transaction.atomic():
        Host.objects.filter(pk=host.pk).update(drained=drained)
        log.record(request.user, "host.drained" if drained else "host.opened", f"Takes {'no' if drained else 'new'} runs.",
                   host)  # fmt: skip
    messages.success(
        request, f"{host.name} takes {'no new runs; what runs there goes on' if drained else 'runs again'}."
    )
    return redirect("hosts:list")
