"""Which devices this host has, and who computes on them. GPUs are named by UUID: their index differs between tools."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now

from webapp.hosts.models import Device, Host
from webapp.hosts.models import host_name as host_name
from webapp.hosts.placement import gpu_of, slot_uuid
from webapp.hosts.processor import multiplies_in_bf16
from workers import processes
from workers.addresses import own_address
from workers.gauges import MIB, GpuUse, gpu_use, host_use

logger = logging.getLogger(__name__)
GPU_SLOTS, CPU_SLOTS = "OFFBEAT_GPU_SLOTS", "OFFBEAT_CPU_SLOTS"
"""Environment variables of a worker: how many runs may share a GPU of its host, or the processor of one without GPUs."""
MOST_SLOTS = 64


class DriverFailed(Exception):
    """NVIDIA's driver is there, but does not say who uses a GPU."""


@dataclass(frozen=True)
class Found:
    """A device of this host: a slot of a GPU, or of the processor."""

    uuid: str
    kind: str
    index: int
    name: str
    memory_mib: int
    use: GpuUse = GpuUse()


def discover(host: str) -> list[Found]:
    """The GPU slots of this machine, or its CPU slots when it has no GPU.

    One slot for each, unless the environment says otherwise; the only GPU of a machine has two, since a server and a
    trainer must share it. A GPU driver that is there but fails gives no device at all, so that no run starts on the wrong
    one. Raises ValueError when the environment's number is none.
    """
    memory = psutil.virtual_memory().total // MIB
    cpu_slot = Found(f"cpu:{host}", Device.Kind.CPU, 0, f"{psutil.cpu_count() or 1} CPU cores", memory)
    try:
        with _nvml() as nvml:
            gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())] if nvml else []
    except DriverFailed as error:
        logger.error("The NVIDIA driver does not answer, so no device of this host is offered: %s", error)
        return []
    if not gpus:
        return _slots(cpu_slot, slots_wanted(CPU_SLOTS, 1))
    count = slots_wanted(GPU_SLOTS, 2 if len(gpus) == 1 else 1)
    return [slot for gpu in gpus for slot in _slots(gpu, count)]


def slots_wanted(variable: str, default: int) -> int:
    """A number of slots from the environment. Raises ValueError with one sentence."""
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdecimal() or not 1 <= int(text) <= MOST_SLOTS:
        raise ValueError(f"{variable} is {text!r}; a whole number from 1 to {MOST_SLOTS} is allowed")
    return int(text)


def _slots(device: Found, count: int) -> list[Found]:
    if count == 1:
        return [device]
    return [
        replace(
            device, uuid=slot_uuid(device.uuid, number), name=f"{device.name}, slot {number} of {count}",
            memory_mib=device.memory_mib // count,
        )
        for number in range(1, count + 1)
    ]  # fmt: skip


def _gpu(nvml: Any, index: int) -> Found:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB
    return Found(
        nvml.nvmlDeviceGetUUID(handle), Device.Kind.GPU, index, nvml.nvmlDeviceGetName(handle), memory, gpu_use(nvml, handle)
    )  # fmt: skip


def computing_on(uuids: Iterable[str]) -> dict[str, list[int]]:
    """Pids of the processes that compute on the GPU of each of these slots, by the GPU's UUID. Raises DriverFailed.

    CPU slots have none.
    """
    gpus = {gpu_of(uuid) for uuid in uuids if not uuid.startswith("cpu:")}
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


def computing_besides(uuids: Iterable[str], attempts: Iterable[str]) -> dict[str, list[int]]:
    """`computing_on` without the processes that carry the mark of one of `attempts`: those share the GPU by right."""
    known = set(attempts)
    found = computing_on(uuids)
    if not known:
        return found
    return {uuid: [pid for pid in pids if processes.mark_of(pid) not in known] for uuid, pids in found.items()}


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
    """Write this host, its devices, their use and the moment (of the database's clock) into the database."""
    found = discover(name)
    with transaction.atomic():
        host, _ = Host.objects.update_or_create(
            name=name,
            defaults={
                "address": own_address(),
                "cpu_count": psutil.cpu_count() or 1,
                "memory_mib": psutil.virtual_memory().total // MIB,
                **asdict(host_use(settings.RUNS_DIR)),
                "bf16": multiplies_in_bf16(),
                "last_seen_at": Now(),
            },
        )
        for device in found:
            Device.objects.update_or_create(
                uuid=device.uuid,
                defaults={
                    "host": host, "kind": device.kind, "index": device.index, "name": device.name,
                    "memory_mib": device.memory_mib, "present": True, **asdict(device.use),
                },
            )  # fmt: skip
        host.devices.exclude(uuid__in=[device.uuid for device in found]).filter(present=True).update(present=False)
    host.refresh_from_db()
    return host
