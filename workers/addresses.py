"""Where other hosts reach this one."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from django.conf import settings

ADDRESS = "OFFBEAT_ADDRESS"
"""Environment variable of a worker: its host's name or IPv4 address for other hosts."""
ELSEWHERE = "192.0.2.1"
"""An address kept for documentation (RFC 5737): the way there is the default route. Nothing is sent."""


def own_address() -> str:
    """From the environment; else the address of the network over which this machine reaches the broker, the database, or
    others at all; 127.0.0.1 for a machine without a network.
    """
    if told := os.environ.get(ADDRESS, "").strip():
        return told
    database = str(settings.DATABASES["default"].get("HOST") or "")
    broker = urlsplit(settings.CELERY_BROKER_URL).hostname or ""
    found = (
        _source_towards(target) for target in (broker, database, ELSEWHERE) if target and not target.startswith("/")
    )
    return next((address for address in found if address and not address.startswith("127.")), "127.0.0.1")


def _source_towards(target: str) -> str:
    """The address that packets to `target` carry; empty when there is no way there. Connecting UDP sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
