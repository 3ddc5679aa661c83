"""Offbeat on GPUs: runs of the sample task through the real supervisor, all at the same time, and what became of them.

Every run is stored, queued, claimed with leases and supervised as the studio does it, only without web server and Celery:
this program asks workers.claiming itself, as the task does. All phases share the GPUs through slots. At the same time the
vLLM server for timing weight pushes starts; the pushes are timed when the runs are over. docs/gpu-runs.md has results.

    python -m bench.gpu_e2e                                    a host with two GPUs
    python -m bench.gpu_e2e --phases adapter,shared,push       one GPU is enough for these
    python -m bench.gpu_e2e --cpu --model DIR                  the same program without a GPU, for a tiny model

Writes results.json (every few seconds), summary.txt and logs.tar.xz into `--out`. What is not over `--seconds` (390) after the
start is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
OUT = ROOT / "var" / "bench" / "gpu_e2e"
SECONDS = 390.0
HOST = "gpu-e2e"
SLOTS = 8
LEAVING_S, REAP_S = 4.0, 5.0
STOP_S, KILL_S, PUSH_S = 45.0, 15.0, 120.0
"""Seconds before the end at which runs are stopped, everything left is killed, and pushes are timed at the latest."""
PUSHED_BY = ("nccl", "nccl-staged")
ENVIRONMENT = {
    "OFFBEAT_HOST": HOST, "CELERY_BROKER_URL": "memory://", "DJANGO_SETTINGS_MODULE": "webapp.settings",
    # Multicast over NVLink needs rights that a shared host does not give.
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def main() -> int:
    arguments = _arguments()
    if not arguments.cpu and not _has_gpu():
        print("bench/gpu_e2e.py needs a CUDA device, or --cpu and a tiny --model; there is none")
        return 0
    out, begin = arguments.out, time.time()
    if out == OUT and arguments.home is None:  # runs of an earlier time would be in the way
        shutil.rmtree(out / "home", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    home = (arguments.home or out / "home").resolve()
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    os.environ |= {"OFFBEAT_HOME": str(home), "OFFBEAT_GPU_SLOTS": str(SLOTS), "OFFBEAT_CPU_SLOTS": "3"}
    _set_up(home)
    found: dict[str, Any] = {"versions": versions(), "phases": {}, "problems": []}
    bench = Bench(arguments, home, begin, found)
    try:
        bench.go()
    except Exception:  # noqa: BLE001  what there is must be written, whatever happened
        traceback.print_exc()
        found["problems"].append(traceback.format_exc(limit=4))
    finally:
        bench.close()
    return 0 if bench.passed else 1


class Bench:
    def __init__(self, arguments: argparse.Namespace, home: Path, begin: float, found: dict[str, Any]) -> None:
        self.arguments = arguments
        self.home = home
        self.begin = begin
        self.end = begin + arguments.seconds
        self.found = found
        self.watched: list[Any] = []
        self.pushes: dict[str, subprocess.Popen[bytes]] = {}
        self.passed = False
        self._saved = self._reaped = 0.0

    def go(self) -> None:
        from bench.support.gpu_phases import CPU_PHASES, PHASES
        from workers import devices

        devices.register_host(HOST)
        wanted = self.arguments.phases.split(",") if self.arguments.phases else None
        for phase in CPU_PHASES if self.arguments.cpu else PHASES:
            if wanted is None or phase.name in wanted:
                self._guarded(phase.name, lambda phase=phase: self._start(phase))
        if not self.arguments.cpu and (wanted is None or "push" in wanted):
            for backend in self.arguments.pushed_by.split(","):
                self._guarded("push", lambda backend=backend: self._start_push(backend))
        stopped = False
        while time.time() < self.end - KILL_S and not self._over():
            self._guarded("reaper", self._reap)
            for run in self.watched:
                self._guarded(run.phase.name, run.look)
            ended = all(run.ended for run in self.watched)
            left = self.end - time.time()
            if ended or left < PUSH_S:
                self._time_pushes()
            if left < STOP_S and not stopped:
                stopped = True
                self._stop_runs()
            self._save(every=5.0)
            time.sleep(0.25)

    def _reap(self) -> None:
        """End runs whose supervisor is gone, as the studio's worker does every few seconds."""
        from workers import reaper

        if time.time() - self._reaped >= REAP_S:
            self._reaped = time.time()
            for attempt in reaper.reap_host(HOST):
                self.found["problems"].append(f"{attempt.run.name} had lost its supervisor: see its supervisor.log")

    def _over(self) -> bool:
        pushed = all(process.poll() is not None for process in self.pushes.values())
        return pushed and all(run.ended for run in self.watched)

    def _guarded(self, name: str, action: Any) -> None:
        """One phase that fails must not stop the others."""
        try:
            action()
        except Exception:  # noqa: BLE001  see above
            traceback.print_exc()
            problem = f"{name}: {traceback.format_exc(limit=3)}"
            if problem not in self.found["problems"]:
                self.found["problems"].append(problem)

    def _start(self, phase: Any) -> None:
        """Store a run, queue it, claim it: the supervisor does the rest."""
        from bench.support.gpu_watch import Watched
        from webapp.accounts.models import User
        from webapp.hosts.models import Device
        from webapp.runs import lifecycle, services
        from workers import claiming, devices

        owner = User.objects.filter(username="bench").first() or User.objects.create_user("bench")
        run = services.create_run(phase.spec(cpu=self.arguments.cpu, model=self.arguments.model), owner)
        lifecycle.launch(run, owner)
        if phase.one_gpu:  # as on a host that has no other
            Device.objects.filter(kind=Device.Kind.GPU, index__gt=0).update(present=False)
        try:
            claimed = claiming.claim_for(HOST)
        finally:
            devices.register_host(HOST)
        attempt = next((attempt for attempt in claimed if attempt.run_id == run.pk), None)
        if attempt is None:
            run.refresh_from_db()
            raise RuntimeError(f"{phase.name} was not claimed: {run.reason}")
        run.refresh_from_db()
        watched = Watched(phase, attempt, self.begin)
        self.watched.append(watched)
        held = [f"{lease.device} for {lease.purpose}" for lease in attempt.leases.select_related("device")]
        print(f"{time.time() - self.begin:6.1f} s {phase.name}: {run.reason} {held}", flush=True)

    def _time_pushes(self) -> None:
        """Let the next of the waiting programs begin, when those before it are over."""
        for backend, process in self.pushes.items():
            if process.poll() is None:
                self._go_file(backend).touch()
                return

    def _go_file(self, backend: str) -> Path:
        return self.home / f"go-{backend}"

    def _start_push(self, backend: str) -> None:
        from webapp.hosts.models import Device
        from webapp.hosts.placement import SLOT_MARK

        gpus = Device.objects.filter(kind=Device.Kind.GPU, present=True).exclude(uuid__contains=SLOT_MARK)
        uuids = list(gpus.order_by("index").values_list("uuid", flat=True))
        command = [
            sys.executable,
            "-m",
            "bench.support.gpu_push",
            "--backend",
            backend,
            "--out",
            str(self.home / backend / "push.json"),
            "--go",
            str(self._go_file(backend)),
        ]
        command += ["--gpus", *uuids[:2], "--end", str(self.end - KILL_S)]
        (self.home / backend).mkdir()
        with open(self.home / backend / "push.log", "wb") as log:
            self.pushes[backend] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )  # fmt: skip

    def _stop_runs(self) -> None:
        from webapp.runs import lifecycle

        for run in self.watched:
            if not run.ended:
                print(f"stops {run.phase.name}, for the time is up", flush=True)
                with suppress(lifecycle.Refused):
                    lifecycle.stop(run.run, None, save=False)

    def close(self) -> None:
        """Kill what is left, look whether anything stayed behind, write everything down."""
        from bench.support.gpu_report import summary
        from workers import processes

        for run in self.watched:
            self._guarded(run.phase.name, run.look)
            if not run.ended and run.attempt.supervisor_pid:
                processes.sweep(str(run.attempt.pk), {run.attempt.supervisor_pid})
        for process in self.pushes.values():
            processes.end(process, 8.0)
        self._guarded("left behind", self._look_around)
        self._save(every=0.0)
        text = summary(self.found)
        (self.arguments.out / "summary.txt").write_text(text)
        print(text, flush=True)
        self._pack_logs()
        self.passed = not self.found["problems"] and all(run.run.state == "completed" for run in self.watched)

    def _look_around(self) -> None:
        """What the runs left behind: processes, leases, and anything that computes on a GPU."""
        from webapp.hosts.models import Lease
        from workers import devices, processes

        def processes_left() -> dict[str, list[int]]:
            return {
                run.phase.name: [found.pid for found in processes.marked(str(run.attempt.pk))] for run in self.watched
            }

        until = time.time() + LEAVING_S  # a supervisor writes the end of its run before its own
        while any(processes_left().values()) and time.time() < until:
            time.sleep(0.25)
        uuids = [device.uuid for device in devices.discover(HOST)]
        self.found["left_behind"] = {
            "processes": processes_left(), "leases": Lease.objects.count(), "on_gpus": devices.computing_on(uuids),
        }  # fmt: skip

    def _save(self, every: float) -> None:
        if time.time() - self._saved < every:
            return
        self._saved = time.time()
        self.found["seconds"] = round(time.time() - self.begin, 1)
        for run in self.watched:
            self._guarded(run.phase.name, lambda run=run: self.found["phases"].update({run.phase.name: run.result()}))
        for backend in self.pushes:
            with suppress(FileNotFoundError, json.JSONDecodeError):
                self.found.setdefault("push", {})[backend] = json.loads((self.home / backend / "push.json").read_text())
        path = self.arguments.out / "results.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.found, indent=1, default=str))
        path.with_suffix(".tmp").replace(path)

    def _pack_logs(self) -> None:
        with tarfile.open(self.arguments.out / "logs.tar.xz", "w:xz", preset=1) as archive:
            for path in sorted(self.home.rglob("*")):
                if path.suffix in (".log", ".json", ".yaml") or path.name == "spool.jsonl":
                    archive.add(path, path.relative_to(self.home))


def versions() -> dict[str, str]:
    """Distributions, interpreter and driver that the numbers belong to."""
    from importlib import metadata

    found = {"python": sys.version.split()[0]}
    for name in (
        "torch",
        "vllm",
        "transformers",
        "peft",
        "accelerate",
        "numpy",
        "django",
        "nvidia-nccl-cu13",
        "triton",
    ):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpus"] = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return found


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _set_up(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0, skip_checks=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results; default: var/bench/gpu_e2e")
    parser.add_argument("--home", type=Path, help="folder of database and runs; default: OUT/home")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when everything is over; default: 390")
    parser.add_argument("--phases", help="names separated by commas; default: all")
    parser.add_argument(
        "--model", help="folder of the model; default: the built-in one, which OFFBEAT_MODELS must hold"
    )
    parser.add_argument("--pushed-by", default=",".join(PUSHED_BY), help="ways to push that are timed; default: all")
    parser.add_argument("--cpu", action="store_true", help="without GPUs, and small")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
