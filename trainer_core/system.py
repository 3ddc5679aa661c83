"""What the trainer's host is doing: processor, memory, and its GPUs by UUID."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil

GIB = 2**30


class SystemMonitor:
    """Samples the host. Processor use is the mean since the sample before, so the first one covers no time at all.

    GPUs are all that the driver shows, those of the server included: both sides of a run matter.
    """

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first call only starts its clock
        self._nvml = _nvml()
        self._gpus = self._handles()
        self._readings: dict[str, Callable[[Any], float]] = {
            "util": lambda handle: float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "mem_gib": lambda handle: self._nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            "power_w": lambda handle: self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }

    def sample(self) -> dict[str, float]:
        """Values by the names of trainer_core.metrics: percent, GiB, watts."""
        values = {"system/cpu": psutil.cpu_percent(), "system/mem_gib": psutil.virtual_memory().used / GIB}
        for uuid, handle in self._gpus.items():
            for name, read in self._readings.items():
                try:
                    values[f"system/gpu/{uuid}/{name}"] = read(handle)
                except self._nvml.NVMLError:  # some cards do not tell some of these; a metric never ends training
                    continue
        return values

    def _handles(self) -> dict[str, Any]:
        if self._nvml is None:
            return {}
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        return {_text(self._nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}


def _nvml() -> Any:
    """The driver's library, or None on a host without one. The binding is in the GPU set of requirements only."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid
