"""The environment of an attempt's processes; their commands are webapp/runs/commands.py's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from webapp.runs.commands import NOT_FOR_CHILDREN, Device, TrainerPlan, check_command, train_command
from workers import processes

__all__ = ["NOT_FOR_CHILDREN", "TrainerPlan", "check_command", "environment", "train_command"]


def environment(
    attempt_id: str, gpus: list[str], device: Device, extra: Mapping[str, str], secrets: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of a server or trainer: this one without the studio's secrets, its devices by UUID, and the mark.

    `secrets` are those that the run names; `extra` is what the command itself asks for, and wins.
    """
    base = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
    base |= {
        processes.MARK: attempt_id,
        # Without it a process that changes its title, as vLLM's do, writes over the environment that /proc shows.
        "SPT_NOENV": "1",
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    if device == "cpu":
        # Server and trainer share the cores: threads that spin while they wait would take them from each other.
        base |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return base | dict(secrets or {}) | dict(extra)
