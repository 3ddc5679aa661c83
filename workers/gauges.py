"""How busy this machine and its GPUs are at the moment. What a card does not tell is None."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MIB = 2**20


@dataclass(frozen=True)
class GpuUse:
    """A whole GPU, whoever uses it: percent of the time that a kernel ran, MiB, degrees Celsius, watts."""

    util: float | None = None
    memory_used_mib: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class HostUse:
    """`load` is the number of processes that run or want to, mean of the last minute; the disk is the one with the runs."""

    load: float
    memory_free_mib: int
    disk_mib: int
    disk_free_mib: int


def gpu_use(nvml: Any, handle: Any) -> GpuUse:
    """Readings of one GPU, of NVIDIA's management library."""

    def told(read: Callable[[], float]) -> float | None:
        try:
            return float(read())
        except nvml.NVMLError:  # some cards do not tell some of these
            return None

    used = told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used // MIB)
    return GpuUse(
        util=told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        memory_used_mib=None if used is None else int(used),
        temperature_c=told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        power_w=told(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    )


def host_use(folder: Path) -> HostUse:
    """Readings of this machine, and of the disk that holds `folder`, or will."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    disk = shutil.disk_usage(there)
    return HostUse(os.getloadavg()[0], psutil.virtual_memory().available // MIB, disk.total // MIB, disk.free // MIB)
