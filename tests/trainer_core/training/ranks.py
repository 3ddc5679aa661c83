"""Starts ranks_program as one or several processes.

They are forked from a server that has imported everything once, since imports take longer than training does here. With
`launcher` they are started as a run's trainer is, by accelerate.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from webapp.runs.commands import fsdp_launcher

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.trainer_core.training.ranks_program"
HOSTS = ("alpha", "beta")
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


@dataclass
class Done:
    """What became of a program: the worst exit code of its processes, and what they said."""

    returncode: int
    said: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(output: Path, job: dict[str, Any], *, ranks: int = 1, fsdp: bool = True, timeout: float = 600) -> Done:
    """Run a job (see ranks_program) with its output in a folder of its own. A process that fails ends the others."""
    output.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PROGRAM])
    port, log = free_port(), output / "program.log"
    shared = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | (FSDP if fsdp and ranks > 1 else {})
    processes = []
    for rank in range(ranks):
        own = {} if ranks == 1 else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        arguments = ({**job, "output": str(output)}, shared | own, log)
        processes.append(context.Process(target=_process, args=arguments))
    for process in processes:
        process.start()
    return Done(_watch(processes, time.monotonic() + timeout), log.read_text())


def launch(output: Path, job: dict[str, Any], *, ranks: int, hosts: int = 1, timeout: float = 600) -> Done:
    """The same under accelerate's launcher, with FSDP2: one launcher for each of the hosts "alpha", "beta", ..., which are all
    this machine.
    """
    output.mkdir(parents=True, exist_ok=True)
    port, started = free_port(), []
    for rank in range(hosts):
        launcher = fsdp_launcher(ranks, port, "127.0.0.1", hosts, rank)
        argv = [sys.executable, *launcher, "-m", PROGRAM, json.dumps({**job, "output": str(output)})]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "OFFBEAT_HOST": HOSTS[rank]}
        with open(output / f"{HOSTS[rank]}.log", "wb") as log:
            started.append(subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout) for process in started]
    said = [(output / f"{name}.log").read_text() for name in HOSTS[:hosts]]
    return Done(max(map(abs, codes)), "\n".join(said))


def _process(job: dict[str, Any], environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from tests.trainer_core.training import ranks_program

    try:
        ranks_program.run(job)
    except Exception:  # noqa: BLE001  a process of its own, whose parent reads its log
        traceback.print_exc()
        os._exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _watch(processes: list[ForkServerProcess], deadline: float) -> int:
    while any(process.is_alive() for process in processes):
        failed = any(process.exitcode for process in processes)
        if failed or time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.1)
    return max(abs(process.exitcode or 0) for process in processes)


def result(output: Path, done: Done) -> dict[str, Any]:
    """What the program kept: `state` and `gradients` by name."""
    assert done.returncode == 0, done.said[-4000:]
    loaded: dict[str, Any] = torch.load(output / "result.pt")
    return loaded


def spool_lines(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "spool.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
