"""A real vLLM server for tests: started as a run starts it, and gone without a trace afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from trainer_core.spec import RunSpec
from workers.serving import Command, Device, serve_command

STARTUP_DEADLINE_S = 900.0  # it takes 20 s where the machine has nothing else to do


class ServerEnded(RuntimeError):
    """A server that ended, or did not answer in time, before it was ready. The text has the end of its log."""


@dataclass
class RunningServer:
    """`pid` is that of the API server and of the process group; `log` holds stdout and stderr."""

    url: str
    port: int
    model_path: Path
    log: Path
    command: Command
    process: subprocess.Popen[bytes]
    shared: list[Path] = field(default_factory=list)
    """Its blocks of shared memory when it became ready, which also go when a test killed it in a way of its own."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL the whole group at once, as a crash of the machine would, and remove the shared memory it leaks."""
        leaked = {*self.shared, *_shared_memory(self.pid)}
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(timeout=30)
        for path in leaked:
            path.unlink(missing_ok=True)

    def start_again(self) -> None:
        """Start it once more on its port, with the weights of its folder, after it was killed."""
        self.process = launch(self.command, self.log)
        wait_until_ready(self)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def tiny_spec(**sections: dict[str, object]) -> RunSpec:
    """A RunSpec small enough for the tiny models on a CPU; `sections` overrides fields, e.g. `lora={"enabled": True}`."""
    fields: dict[str, dict[str, object]] = {
        "server": {"max_model_len": 512, "dtype": "float32", "kv_cache_gib": 0.0625, "max_num_seqs": 16},
        "rollout": {"max_completion_length": 64},
        "lora": {"enabled": False},
    }
    for name, values in sections.items():
        fields[name] = {**fields.get(name, {}), **values}
    return RunSpec.model_validate(fields)


def launch(command: Command, log: Path) -> subprocess.Popen[bytes]:
    """Start a command in its own session, its output appended to `log`."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until_ready(server: RunningServer, deadline_s: float = STARTUP_DEADLINE_S) -> None:
    """Return once /health answers 200. Raises ServerEnded when it cannot any more."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            tail = server.log.read_text(errors="replace")[-3000:]
            raise ServerEnded(f"the test server ended with code {server.process.returncode}:\n{tail}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                server.shared = _shared_memory(server.pid)
                return
        time.sleep(0.25)
    tail = server.log.read_text(errors="replace")[-3000:]
    raise ServerEnded(f"the test server did not answer /health within {deadline_s:.0f} s:\n{tail}")


@contextmanager
def running_server(
    spec: RunSpec,
    model_path: Path,
    log: Path,
    port: int | None = None,
    device: Device = "cpu",
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """A server of this run, killed with everything it started when the block ends.

    `extra` are more of its arguments, which win over the run's; `env` more of its environment.
    """
    port = port or free_port()
    command = serve_command(spec, model_path=str(model_path), port=port, device=device)
    command.argv.extend(extra)
    command.env.update(env or {})
    server = RunningServer(f"http://127.0.0.1:{port}", port, model_path, log, command, launch(command, log))
    try:
        wait_until_ready(server)
        yield server
    finally:
        server.kill()


def _shared_memory(group: int) -> list[Path]:
    """Blocks under /dev/shm that processes of this group have mapped: a killed server cannot remove them itself.

    Compared by inode: the C library makes a semaphore under another name than the one it ends up with.
    """
    inodes = set()
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.getpgid(process.pid) == group:
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    fields = line.split(maxsplit=5)
                    if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                        inodes.add(int(fields[4]))
    return [entry for entry in Path("/dev/shm").iterdir() if entry.stat().st_ino in inodes]
