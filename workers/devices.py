"""Which devices this host has, and who computes on them. GPUs are named by UUID: their index differs between tools."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from django.db import transaction
from django.db.models.functions import Now

from webapp.hosts.models import Device, Host

logger = logging.getLogger(__name__)
MIB = 2**20


class DriverFailed(Exception):
    """NVIDIA's driver is there, but does not say who uses a GPU."""


@dataclass(frozen=True)
class Found:
    """A device of this host."""

    uuid: str
    kind: str
    index: int
    name: str
    memory_mib: int


def host_name() -> str:
    return os.environ.get("OFFBEAT_HOST") or socket.gethostname()


def discover(host: str) -> list[Found]:
    """The GPUs of this machine, or its one CPU slot when it has none.

    A GPU driver that is there but fails gives no device at all, so that no run starts on the wrong one.
    """
    memory = psutil.virtual_memory().total // MIB
    cpu_slot = Found(f"cpu:{host}", Device.Kind.CPU, 0, f"{psutil.cpu_count() or 1} CPU cores", memory)
    try:
        with _nvml() as nvml:
            gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())] if nvml else []
    except DriverFailed as error:
        logger.error("The NVIDIA driver does not answer, so no device of this host is offered: %s", error)
        return []
    return gpus or [cpu_slot]


def _gpu(nvml: Any, index: int) -> Found:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB
    return Found(
        nvml.nvmlDeviceGetUUID(handle), Device.Kind.GPU, index, nvml.nvmlDeviceGetName(handle), memory
    )  # fmt: skip


def computing_on(uuids: Iterable[str]) -> dict[str, list[int]]:
    """Pids of the processes that compute on each of these GPUs. CPU slots have none. Raises DriverFailed."""
    gpus = [uuid for uuid in uuids if not uuid.startswith("cpu:")]
    if not gpus:
        return {}
    with _nvml() as nvml:
        if nvml is None:
            return {}
        handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in gpus}
        return {
            uuid: [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            for uuid, handle in handles.items()
        }


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVIDIA's management library, or None on a machine without it. Its errors become DriverFailed."""
    try:
        import pynvml
    except ImportError:  # part of the GPU set of requirements only
        yield None
        return
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        raise DriverFailed(str(error)) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise DriverFailed(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def register_host(name: str) -> Host:
    """Write this host, its devices and the moment (of the database's clock) into the database."""
    found = discover(name)
    with transaction.atomic():
        host, _ = Host.objects.update_or_create(
            name=name,
            defaults={
                "cpu_count": psutil.cpu_count() or 1,
                "memory_mib": psutil.virtual_memory().total // MIB,
                "last_seen_at": Now(),
            },
        )
        for device in found:
            Device.objects.update_or_create(
                uuid=device.uuid,
                defaults={
                    "host": host, "kind": device.kind, "index": device.index, "name": device.name,
                    "memory_mib": device.memory_mib, "present": True,
                },
            )  # fmt: skip
        host.devices.exclude(uuid__in=[device.uuid for device in found]).filter(present=True).update(present=False)
    host.refresh_from_db()
    return host
