"""System metrics: those of this machine, by names that the table knows."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from trainer_core.metrics import describe
from trainer_core.system import SystemMonitor


def test_processor_and_memory_are_those_of_this_machine() -> None:
    monitor = SystemMonitor()
    before = sum(os.times()[:2])
    while sum(os.times()[:2]) - before < 0.3:
        sum(range(10_000))
    values = monitor.sample()
    assert 100 * 0.3 / (0.3 + 10) / (psutil.cpu_count() or 1) < values["system/cpu"] <= 100
    assert values["system/mem_gib"] == pytest.approx(psutil.virtual_memory().used / 2**30, rel=0.2)
    assert all(describe(name) is not None for name in values)


@pytest.mark.gpu
def test_a_busy_gpu_is_seen_by_its_uuid() -> None:
    import torch

    monitor = SystemMonitor()
    matrix = torch.randn(8192, 8192, device="cuda")
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    torch.cuda.synchronize()
    values = monitor.sample()
    busy = [name for name, value in values.items() if name.endswith("/util") and value > 20]
    assert busy
    assert busy[0].startswith("system/gpu/GPU-")
    uuid = busy[0].split("/")[2]
    assert values[f"system/gpu/{uuid}/mem_gib"] > 0.25
    assert values[f"system/gpu/{uuid}/power_w"] > 50
