"""Small programs in the place of vLLM and the trainer, and supervisors and a Celery app that start them.

Everything else in these tests is real: database file, broker, Celery worker, supervisor, processes, signals. What a
trainer does is written in the spec's `notes`.

usage: python -m tests.workers.stand_ins server PORT BEHAVIOUR | trainer RUN_DIR ATTEMPT_DIR BEHAVIOUR [PORT HOSTS]
                                       | rank ADDRESS PORT BEHAVIOUR
"""

from __future__ import annotations

import errno
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

SENTENCE = "Reward function greeting returned 3 numbers for 4 completions; one for each is needed."
SLEEPER = [sys.executable, "-c", "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def server(port: int, behaviour: str) -> None:
    """Answers /health and /pause, and holds a shared-memory block. As vLLM's, its engine outlives it, and when the engine
    is killed it closes its port and hangs."""
    if behaviour == "no-server":
        print("ValueError: the server does not like this model", flush=True)
        sys.exit(1)
    if behaviour == "one-server" and _is_second():
        print("ValueError: there is room for one server", flush=True)
        sys.exit(1)
    engine = "from setproctitle import setproctitle as s; s('VLLM::EngineCore'); import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", engine])
    memory = _gpu_memory() if behaviour == "gpu" else None
    block = shared_memory.SharedMemory(create=True, size=4096)
    print("block", block.name, flush=True)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    answers = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=answers.serve_forever, daemon=True).start()
    child.wait()
    del memory
    answers.shutdown()
    answers.server_close()
    time.sleep(600)


def _is_second() -> bool:
    """Whether another server of the studio has been here before."""
    try:
        (Path(os.environ["OFFBEAT_STUDIO"]) / "first-server").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


LEAVING = threading.Event()
"""Set when this trainer has told the ranks of other hosts to go."""


def trainer(run_dir: Path, attempt_dir: Path, behaviour: str, port: str = "0", hosts: str = "1") -> None:
    from trainer_core.spool import SPOOL_FILE, Spool

    others = meet(int(port), int(hosts) - 1, Spool(attempt_dir / SPOOL_FILE)) if hosts != "1" else []
    train(run_dir, attempt_dir, behaviour)
    LEAVING.set()
    for other in others:
        other.sendall(b"bye")


def meet(port: int, count: int, spool: Any) -> list[socket.socket]:
    """Waits for the ranks of other hosts. When one of them goes, this process says so and ends, as the trainer's does."""

    def watch(connection: socket.socket) -> None:
        connection.recv(1)
        if LEAVING.is_set():
            return
        spool.event(0, "error", "failed", "Trainer rank 1 ended without a word.", kind="RankLost")
        os._exit(1)

    found: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", port)) as listener:
        while len(found) < count:
            connection = listener.accept()[0]
            if connection.recv(4) == b"rank":  # not one that only looks whether somebody listens
                found.append(connection)
                threading.Thread(target=watch, args=(connection,), daemon=True).start()
    return found


def rank(address: str, port: int, behaviour: str) -> None:
    """A rank of a further host: lives until the first one says goodbye, or is gone."""
    if behaviour == "crash-there":
        raise ValueError("this rank can't go on")
    with socket.create_connection((address, port)) as connection:
        connection.sendall(b"rank")
        print("Its rank has met the first one.", flush=True)
        if connection.recv(3) != b"bye":
            sys.exit("Trainer rank 0 on host test-host ended.")


def train(run_dir: Path, attempt_dir: Path, behaviour: str) -> None:
    from trainer_core.spool import ROLLOUTS_FILE, SPOOL_FILE, Spool

    spool, rollouts = Spool(attempt_dir / SPOOL_FILE), Spool(attempt_dir / ROLLOUTS_FILE)
    subprocess.Popen(SLEEPER, start_new_session=True)
    print("trainer of", os.environ["OFFBEAT_ATTEMPT"], "with", sorted(os.environ), flush=True)
    if behaviour == "secret":
        raise ValueError(f"the hub refused {os.environ['HF_TOKEN']}")
    if behaviour == "crash":
        raise ValueError("this trainer can't go on")
    memory = _gpu_memory() if behaviour == "gpu" else None
    if behaviour == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spool.event(0, "info", "started", "The model is loaded.")
    step = 0
    while behaviour in ("forever", "hang", "gpu") or step < 30:
        step += 1
        spool.metrics(step, {"reward": step / 100, "loss": float("nan") if step == 7 else 1 / step})
        rollouts.rollout(step, {"group_id": f"g{step}", "row_index": step, "reward": 0.5, "turns": []})
        if step == 1:
            spool.event(step, "info", "first_step", "The first step is done.")
        if behaviour == "fail" and step == 10:
            spool.event(step, "error", "failed", SENTENCE)
            sys.exit(1)
        control = attempt_dir / "control"
        if behaviour != "hang" and control.exists():
            if control.read_text() == "stop_and_save":
                _save(run_dir, step, spool)
            spool.event(step, "info", "stopped", f"Stopped at step {step}.")
            return
        time.sleep(0.05)
    del memory
    _save(run_dir, step, spool)
    spool.event(step, "info", "finished", "All steps are done.")


def _gpu_memory() -> Any:
    """A gibibyte of the one GPU that is visible; prints which one that is."""
    import torch

    assert torch.cuda.device_count() == 1
    print(f"GPU-{torch.cuda.get_device_properties(0).uuid}", flush=True)
    return torch.ones(2**28, device="cuda")


def _save(run_dir: Path, step: int, spool: Any) -> None:
    folder = run_dir / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    data = {"path": str(folder), "size_bytes": 2, "kind": "adapter"}
    spool.event(step, "info", "checkpoint", f"Saved step {step}.", **data)


def _behaviour(spec: Any) -> str:
    return spec.notes.split()[0]


def serve_stand_in(spec: Any, *, model_path: str, port: int, device: str, **_: Any) -> Any:
    from workers.serving import Command

    if _behaviour(spec) == "full-disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")
    if _behaviour(spec) == "bug":
        raise ZeroDivisionError("a mistake in the supervisor")
    return Command([sys.executable, "-m", "tests.workers.stand_ins", "server", str(port), _behaviour(spec)], {})


def train_stand_in(plan: Any) -> Any:
    from trainer_core.spec import RunSpec
    from workers.serving import Command

    behaviour = _behaviour(RunSpec.from_yaml((plan.run_dir / "spec.yaml").read_text()))
    module = [sys.executable, "-m", "tests.workers.stand_ins"]
    if plan.host_rank:
        return Command([*module, "rank", *map(str, plan.rendezvous), behaviour], {})
    meeting = [] if plan.hosts == 1 else [str(plan.rendezvous[1]), str(plan.hosts)]
    return Command([*module, "trainer", str(plan.run_dir), str(plan.attempt_dir), behaviour, *meeting], {})


def check_stand_in(run_dir: Path, resume: Path | None) -> Any:
    """The trainer's own checks where a run is about them; elsewhere nothing, which takes less time."""
    from trainer_core.spec import RunSpec
    from workers.launching import check_command
    from workers.serving import Command

    checked = _behaviour(RunSpec.from_yaml((run_dir / "spec.yaml").read_text())) == "checked"
    return check_command(run_dir, resume) if checked else Command([sys.executable, "-c", ""], {})


def supervise_playground(arguments: list[str]) -> None:
    """The real supervisor of a playground server around the stand-in, with little patience for queued runs."""
    from workers.playground import supervisor

    supervisor.GIVES_WAY_S = 2.0
    supervisor.main(arguments, partial(supervisor.PlaygroundSupervisor, serve=serve_stand_in))


def supervise(arguments: list[str]) -> None:
    """The real supervisor around the stand-ins, with short graces."""
    from workers import supervisor
    from workers.followers import watching

    watching.SILENT_FOR_S = 12.0
    supervisor.STOP_GRACE_S, supervisor.TERM_GRACE_S, supervisor.SHUTDOWN_GRACE_S = 3.0, 1.0, 5.0
    supervisor.main(
        arguments, partial(supervisor.Supervisor, serve=serve_stand_in, train=train_stand_in, check=check_stand_in)
    )  # fmt: skip


def supervise_follower(arguments: list[str]) -> None:
    """The real supervisor of a further host around the stand-in."""
    from workers.followers import supervisor

    supervisor.TERM_GRACE_S, supervisor.SHUTDOWN_GRACE_S = 1.0, 10.0
    supervisor.main(arguments, partial(supervisor.FollowerSupervisor, train=train_stand_in))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "server":
        server(int(rest[0]), rest[1])
    elif what == "trainer":
        trainer(Path(rest[0]), Path(rest[1]), *rest[2:])
    elif what == "rank":
        rank(rest[0], int(rest[1]), rest[2])
    elif what == "--attempt":
        supervise(sys.argv[1:])
    elif what == "--follower":
        supervise_follower(sys.argv[1:])
    elif what == "--server":
        supervise_playground(sys.argv[1:])
    else:
        sys.exit(f"unknown part {what!r}")
