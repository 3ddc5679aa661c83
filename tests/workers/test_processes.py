"""Every process of an attempt is found and ended: changed title, own session, scrubbed environment, dead parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from tests.workers.conftest import wait_for
from workers import processes

SLEEP = "import time; time.sleep(600)"
TITLED = "import time, setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); print('ready', flush=True); time.sleep(600)"
# A leader that starts children of three kinds and is then killed: plain, in a session of its own, and without the mark.
FAMILY = f"""
import os, subprocess, sys, time
sleep = [sys.executable, "-c", {SLEEP!r}]
children = [
    subprocess.Popen(sleep),
    subprocess.Popen(sleep, start_new_session=True),
    subprocess.Popen(sleep, env={{"PATH": os.environ["PATH"]}}),
]
print(*[child.pid for child in children], flush=True)
time.sleep(600)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    mark = str(uuid.uuid4())
    yield mark
    for process in processes.marked(mark):
        process.kill()


def spawn(code: str, mark: str, **extra: str) -> subprocess.Popen[str]:
    env = {**os.environ, processes.MARK: mark, **extra}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    process.stdout.close()
    return line


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_changed_title_does_not_hide_the_mark(mark: str) -> None:
    """vLLM's processes retitle themselves, which writes over what /proc shows, unless SPT_NOENV is set."""
    from workers.launching import environment

    env = environment(mark, [], "cpu", {})
    kept = spawn(TITLED, mark, SPT_NOENV=env["SPT_NOENV"])
    assert first_line(kept) == "ready"
    assert [process.pid for process in processes.marked(mark)] == [kept.pid]
    lost = spawn(TITLED, mark)
    assert first_line(lost) == "ready"
    assert lost.pid not in {process.pid for process in processes.marked(mark)}, "else SPT_NOENV is not needed any more"
    processes.sweep(mark, {lost.pid})
    assert lost.wait(5) == kept.wait(5) == -9


def test_sweep_ends_a_family_whose_head_was_killed(mark: str) -> None:
    head = spawn(FAMILY, mark)
    plain, session, scrubbed = map(int, first_line(head).split())
    head.kill()
    head.wait()
    assert not any(map(is_gone, (plain, session, scrubbed))), "they outlive their parent"
    killed, alive = processes.sweep(mark, {head.pid})
    assert alive == []
    assert {plain, session, scrubbed} <= set(killed)
    for pid in (plain, session, scrubbed):
        wait_for(lambda pid=pid: is_gone(pid), f"the end of {pid}", 5)


def test_sweep_spares_strangers_in_a_group_number_given_out_again(mark: str) -> None:
    """A recorded group whose members were born after the attempt's last heartbeat belongs to somebody else."""
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    born = psutil.Process(stranger.pid).create_time()
    assert processes.sweep(mark, {stranger.pid}, created_before=born - 100) == ([], [])
    assert stranger.poll() is None
    assert processes.sweep(mark, {stranger.pid}, created_before=born + 1) == ([stranger.pid], [])
    assert stranger.wait(5) == -9


def test_identity_is_more_than_a_pid(mark: str) -> None:
    process = spawn(SLEEP, mark)
    created = psutil.Process(process.pid).create_time()
    wait_for(lambda: processes.marked(mark), "the process", 5)
    assert processes.is_alive(process.pid, created, mark)
    assert processes.is_alive(process.pid, created - 1000, mark), "the clock was set; the mark says it is the same"
    assert not processes.is_alive(process.pid, created - 1000, "another mark")
    assert not processes.is_alive(None, None, mark)
    process.kill()
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "a zombie", 5)
    assert not processes.is_alive(process.pid, created, mark), "a zombie is dead"
    process.wait()
    assert not processes.is_alive(process.pid, created, mark)


def test_end_waits_for_a_graceful_exit_then_kills_the_group(mark: str, tmp_path: Path) -> None:
    env = {**os.environ, processes.MARK: mark}
    graceful = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
        "print(1, flush=True); time.sleep(99)"
    )
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    )
    for code, expected in ((graceful, 7), (stubborn, -signal.SIGKILL)):
        log = tmp_path / f"{expected}.log"
        process = processes.start([sys.executable, "-u", "-c", code], env=env, log=log)
        wait_for(lambda log=log: log.read_text() == "1\n", "the handler", 5)
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        assert processes.end(process, grace_s=1.0) == expected
    assert processes.marked(mark) == []


def test_shared_memory_of_a_killed_owner_is_found_and_removed(mark: str, tmp_path: Path) -> None:
    code = (
        "from multiprocessing import shared_memory; import time\n"
        "block = shared_memory.SharedMemory(create=True, size=4096); print(block.name, flush=True); time.sleep(600)"
    )
    owner = spawn(code, mark)
    path = Path("/dev/shm") / first_line(owner)
    foreign = shared_memory.SharedMemory(create=True, size=4096)
    try:
        blocks = processes.shared_memory([psutil.Process(owner.pid)])
        assert blocks == {str(path)}
        processes.write_record(tmp_path, {owner.pid}, blocks)
        processes.sweep(mark)
        owner.wait(5)
        groups, recorded = processes.read_record(tmp_path)
        assert groups == {owner.pid}
        processes.remove_shared_memory(recorded)
        assert not path.exists()
        assert Path("/dev/shm", foreign.name).exists()
    finally:
        foreign.close()
        foreign.unlink()


def test_no_record_is_an_empty_one(tmp_path: Path) -> None:
    assert processes.read_record(tmp_path) == (set(), set())
