"""The trainer's command line, and the environment of an attempt's processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers import processes
from workers.serving import Command, Device

NOT_FOR_CHILDREN = ("DATABASE_URL", "CELERY_BROKER_URL", "DJANGO_SETTINGS_MODULE", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class TrainerPlan:
    """What a trainer is started with. `rendezvous_port` is needed with more than one process.

    `resume` is a checkpoint of the run; `start` holds the weights a forked run begins with while it has none of its own.
    """

    run_dir: Path
    attempt_dir: Path
    model: Path
    servers: list[str]
    resume: Path | None
    processes: int
    rendezvous_port: int | None
    start: Path | None = None


def train_command(plan: TrainerPlan) -> Command:
    """The trainer as docs/architecture.md has it: one process, or one for each training GPU under `accelerate launch`."""
    module = ["-m", "trainer_core.launch"]
    if plan.processes > 1:
        accelerate = [
            "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--num_processes", str(plan.processes), "--main_process_port",
            str(plan.rendezvous_port),
        ]  # fmt: skip
        module = [*accelerate, *module]
    argv = [sys.executable, *module, "--spec", str(plan.run_dir / "spec.yaml"), "--run-dir", str(plan.run_dir)]
    argv += ["--attempt-dir", str(plan.attempt_dir), "--model", str(plan.model)]
    for server in plan.servers:
        argv += ["--server", server]
    if plan.resume is not None:
        argv += ["--resume", str(plan.resume)]
    elif plan.start is not None:
        argv += ["--start-from", str(plan.start)]
    return Command(argv, {})


def environment(attempt_id: str, gpus: list[str], device: Device, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of a server or trainer: this one without the studio's secrets, its devices by UUID, and the mark.

    `extra` is what the command itself asks for, and wins.
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
    return base | dict(extra)
