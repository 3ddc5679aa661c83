"""Processes of an attempt: each in a session of its own, found again by a mark, ended as a group.

The mark is the environment variable OFFBEAT_ATTEMPT, which children inherit. It finds processes that re-parented, left
their group, or outlived the supervisor. Recorded process groups find those that lost the mark.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson
import psutil

MARK = "OFFBEAT_ATTEMPT"
RECORD_FILE = "processes.json"
PR_SET_CHILD_SUBREAPER = 36
CREATE_TIME_TOLERANCE_S = 2.0
SWEEP_DEADLINE_S = 15.0


def become_subreaper() -> None:
    """Orphaned descendants are re-parented to this process instead of init. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that pid, group and session are one number; its output is appended to `log`."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            list(argv), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def signal_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to a process group; False when nobody is in it any more."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """SIGTERM to a process's group, SIGKILL to it after `grace_s`; also when only the leader is gone. Returns the code."""
    if process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def is_alive(pid: int | None, create_time: float | None, mark: str) -> bool:
    """Whether this very process lives: the pid alone may have been given to another one since.

    A step of the system clock shifts creation times, so a process that carries the mark counts as well.
    """
    if pid is None or create_time is None:
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return abs(process.create_time() - create_time) < CREATE_TIME_TOLERANCE_S or _has_mark(process, mark)
    except psutil.NoSuchProcess:
        return False


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that carry OFFBEAT_ATTEMPT=<mark>, this one excepted."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has_mark(process, mark)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def mark_of(pid: int) -> str | None:
    """The attempt that a process belongs to; None for a stranger, and for one that can't be read any more."""
    try:
        return psutil.Process(pid).environ().get(MARK)
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return None


def members(groups: Iterable[int]) -> list[psutil.Process]:
    """Live processes of these process groups."""
    wanted = set(groups)
    found = []
    for process in psutil.process_iter() if wanted else ():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) in wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def belonging(mark: str, groups: Iterable[int] = (), created_before: float = math.inf) -> list[psutil.Process]:
    """Marked processes, members of `groups`, and all descendants of these and of this process if it is the supervisor.

    A recorded group number may have been given to strangers since: only members born before `created_before` count.
    """
    found = {process.pid: process for process in marked(mark)}
    for process in members(groups):
        with suppress(psutil.NoSuchProcess):
            if process.create_time() <= created_before:
                found[process.pid] = process
    roots = list(found.values())
    if os.environ.get(MARK) == mark:
        roots.append(psutil.Process())
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            for child in root.children(recursive=True):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = child
    found.pop(os.getpid(), None)
    return list(found.values())


def sweep(mark: str, groups: Iterable[int] = (), created_before: float = math.inf) -> tuple[list[int], list[int]]:
    """Kill everything that belongs to the attempt, again until nothing is found. Returns (killed, still alive) pids."""
    groups = list(groups)
    deadline = time.monotonic() + SWEEP_DEADLINE_S
    killed: set[int] = set()
    while rest := belonging(mark, groups, created_before):
        if time.monotonic() > deadline:
            return sorted(killed - {process.pid for process in rest}), sorted(process.pid for process in rest)
        for process in rest:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
                killed.add(process.pid)
        if os.environ.get(MARK) == mark:
            reap_orphans(own=())
        time.sleep(0.05)
    return sorted(killed), []


def reap_orphans(own: Iterable[int]) -> None:
    """Collect exited processes that re-parented to this one. `own` children are left to their Popen, which wants the code."""
    keep = set(own)
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.pid not in keep and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Paths of multiprocessing's shared-memory blocks that these processes have mapped; a killed owner leaks them."""
    blocks: set[str] = set()
    for process in processes:
        with suppress(OSError), open(f"/proc/{process.pid}/maps", errors="replace") as maps:
            blocks |= {line.split(maxsplit=5)[5].strip() for line in maps if " /dev/shm/psm_" in line}
    return {block.removesuffix(" (deleted)") for block in blocks}


def remove_shared_memory(blocks: Iterable[str]) -> None:
    for block in blocks:
        Path(block).unlink(missing_ok=True)


def write_record(folder: Path, groups: Iterable[int], blocks: Iterable[str]) -> None:
    """Remember process groups and shared memory of an attempt on disk, for a reaper that comes after a killed supervisor."""
    path = folder / RECORD_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(orjson.dumps({"groups": sorted(groups), "shared_memory": sorted(blocks)}))
    os.replace(temporary, path)


def read_record(folder: Path) -> tuple[set[int], set[str]]:
    """(groups, shared memory) of an attempt; empty when it never started a process."""
    try:
        record = orjson.loads((folder / RECORD_FILE).read_bytes())
    except FileNotFoundError:
        return set(), set()
    return set(record["groups"]), set(record["shared_memory"])
