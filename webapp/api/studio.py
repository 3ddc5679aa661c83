"""The studio itself: hosts, the account that asks, and whether the web process is well."""

from __future__ import annotations

from typing import Any

from django.db import connection
from django.http import HttpRequest
from ninja import Router

from webapp.accounts.permissions import user_of
from webapp.api.schemas import HealthOut, HostOut, MeOut
from webapp.hosts.models import Host

router = Router(tags=["studio"])


@router.get("/hosts", response=list[HostOut])
def hosts(request: HttpRequest) -> list[dict[str, Any]]:
    """Hosts, their devices, how busy they are, and which run holds each."""
    found = Host.objects.prefetch_related("devices__lease__attempt", "devices__lease__playground")
    return [
        {
            **{name: getattr(host, name) for name in (
                "name", "address", "alive", "drained", "cpu_count", "memory_mib", "load", "memory_free_mib", "disk_mib",
                "disk_free_mib", "last_seen_at",
            )},
            "devices": [
                {
                    **{name: getattr(device, name) for name in (
                        "uuid", "kind", "index", "name", "memory_mib", "util", "memory_used_mib", "temperature_c", "power_w",
                        "present",
                    )},
                    "run": device.lease.holder.run_id if hasattr(device, "lease") else None,
                }
                for device in host.devices.all()
            ],
        }
        for host in found
    ]  # fmt: skip


@router.get("/me", response=MeOut)
def me(request: HttpRequest) -> dict[str, Any]:
    """The account that a token belongs to."""
    user = user_of(request)
    return {
        "username": user.username, "admin": user.is_superuser, "role": user.role, "reads_only": user.looks_only,
    }  # fmt: skip


@router.get("/health", response=HealthOut, auth=None)
def health(request: HttpRequest) -> dict[str, str]:
    """Answers while the web process and the database work; needs no token."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return {"status": "ok"}
