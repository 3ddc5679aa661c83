"""Starts ranks_program as one process, or as several under accelerate's launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from webapp.runs.commands import fsdp_launcher

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.trainer_core.training.ranks_program"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    output: Path, job: dict[str, Any], *, ranks: int = 1, fsdp: bool = True, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a job (see ranks_program) with its output in a folder of its own."""
    output.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", PROGRAM]
    if ranks > 1 and fsdp:
        argv = [sys.executable, *fsdp_launcher(ranks, free_port()), "-m", PROGRAM]
    elif ranks > 1:
        argv = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m", PROGRAM,
        ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [*argv, json.dumps({**job, "output": str(output)})],
        cwd=ROOT, env=env, timeout=timeout, text=True, capture_output=True, check=False,
    )  # fmt: skip


def result(output: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the program kept: `state` and `gradients` by name."""
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, Any] = torch.load(output / "result.pt")
    return loaded


def spool_lines(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "spool.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
