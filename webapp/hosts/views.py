"""Hosts: devices, who holds them, and what waits."""

from __future__ import annotations

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
from webapp.runs.models import Run, State


@require_safe
def hosts(request: HttpRequest) -> HttpResponse:
    devices = Device.objects.select_related("lease__attempt__run__owner").order_by("kind", "index")
    queue = Run.objects.filter(state=State.QUEUED).select_related("owner").order_by("queued_at")
    found = list(Host.objects.prefetch_related(Prefetch("devices", devices)))
    present = [device for host in found for device in host.devices.all() if device.present]
    context = {
        "hosts": found, "queue": queue, "devices": len(present),
        "busy": sum(1 for device in present if hasattr(device, "lease")),
    }  # fmt: skip
    if request.GET.get("fragment"):
        return unless_seen(request, render_to_string("hosts/fragment.html", context, request=request))
    return render(request, "hosts/list.html", context)


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
