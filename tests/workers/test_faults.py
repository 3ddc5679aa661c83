"""kill -9 of each part: within 30 s the state tells the truth, nothing is left over, devices are free, resume works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.conftest import Studio, wait_for
from tests.workers.test_lifecycle import assert_nothing_left, wait_for_end, wait_for_state

pytestmark = pytest.mark.slow
TRUTH_S = 30


@pytest.fixture
def live(studio: Studio, make_run: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """A run that trains under a real worker and beat, which are returned with it: (run, attempt, worker)."""
    worker = studio.start_worker()
    studio.start_beat()
    run = make_run("forever")
    wait_for_state(run, "running")
    attempt = run.current_attempt
    wait_for(lambda: run.series.filter(name="reward", points__gt=3).exists(), "points", 15)
    return run, attempt, worker


def assert_resumes(studio: Studio, run: Any) -> None:
    from webapp.runs.lifecycle import resume, stop

    resume(run, None)
    wait_for_state(run, "running")
    stop(run, None, save=False)
    wait_for_end(studio, run, "stopped")


def assert_all_shipped(run: Any, attempt: Any) -> None:
    """Every whole line of the files is in the database, once."""
    from webapp.metrics.models import Series

    attempt.refresh_from_db()
    spool = (attempt.folder / "spool.jsonl").read_bytes()
    assert attempt.spool_offset == spool.rfind(b"\n") + 1
    assert Series.objects.get(attempt=attempt, name="loss").points == spool.count(b'"kind":"metrics"')
    rollouts = (attempt.folder / "rollouts.jsonl").read_bytes()
    assert run.rollouts.filter(attempt=attempt).count() == rollouts.count(b"\n")


def test_a_run_whose_trainer_was_killed_says_by_which_signal(studio: Studio, live: tuple[Any, Any, Any]) -> None:
    run, attempt, _ = live
    studio.program(attempt, "stand_ins trainer").kill()
    wait_for_end(studio, run, "failed", seconds=TRUTH_S)
    assert run.reason == (
        "The trainer was killed by signal 9 (out of memory?); resume to go on from the last checkpoint."
    )
    assert_all_shipped(run, attempt)
    assert_resumes(studio, run)


@pytest.mark.parametrize("victim", ["stand_ins server", "VLLM::EngineCore"])
def test_the_server_is_started_again(studio: Studio, live: tuple[Any, Any, Any], victim: str) -> None:
    """On its port, after what its dead half left is gone; training goes on meanwhile."""
    run, attempt, _ = live
    trainer = studio.program(attempt, "stand_ins trainer")
    server, engine = studio.program(attempt, "stand_ins server"), studio.program(attempt, "VLLM::EngineCore")
    studio.program(attempt, victim).kill()
    again = wait_for(
        lambda: [p for p in studio.programs(attempt, "stand_ins server") if p.pid != server.pid],
        "the new server",
        TRUTH_S,
    )
    assert again[0].cmdline() == studio.program(attempt, "stand_ins server").cmdline()
    for old in (server, engine):
        wait_for(lambda old=old: not old.is_running() or old.status() == "zombie", f"the end of {old}", 5)
    wait_for(lambda: run.events.filter(name="server_restarted").exists(), "the event", 5)
    attempt.refresh_from_db()
    assert attempt.server_restarts == 1
    assert trainer.is_running()
    run.refresh_from_db()
    assert run.state == "running"
    from webapp.runs.lifecycle import stop

    stop(run, None, save=True)
    wait_for_end(studio, run, "stopped", seconds=TRUTH_S)


def test_a_server_that_keeps_dying_ends_the_run(studio: Studio, live: tuple[Any, Any, Any]) -> None:
    run, attempt, _ = live
    dead: set[int] = set()
    for _ in range(4):  # server.max_restarts is 3
        new = wait_for(
            lambda: [p for p in studio.programs(attempt, "stand_ins server") if p.pid not in dead], "a server", TRUTH_S
        )
        dead.add(new[0].pid)
        new[0].kill()
    wait_for_end(studio, run, "failed", seconds=TRUTH_S)
    assert run.reason.startswith("The vLLM server died again after 3 restarts: ")


def test_a_run_whose_supervisor_was_killed_ends_with_its_reason_and_nothing_left(
    studio: Studio, live: tuple[Any, Any, Any]
) -> None:
    run, attempt, _ = live
    studio.program(attempt, "--attempt").kill()
    wait_for_state(run, "failed", seconds=TRUTH_S)
    assert run.reason == (
        "The run's supervisor was killed, so its processes were ended; resume to go on from the last checkpoint."
    )
    assert_nothing_left(studio, attempt)
    assert_all_shipped(run, attempt)
    assert_resumes(studio, run)


def test_nothing_is_left_when_every_process_of_a_run_is_killed_at_once(
    studio: Studio, live: tuple[Any, Any, Any]
) -> None:
    """As the kernel does when memory runs out; nobody is left to say which shared memory was theirs."""
    run, attempt, _ = live
    for process in studio.marked(attempt):
        process.kill()
    wait_for_state(run, "failed", seconds=TRUTH_S)
    assert_nothing_left(studio, attempt)


def test_the_worker_and_the_run_goes_on(studio: Studio, live: tuple[Any, Any, Any]) -> None:
    """A killed worker leaves nothing but the supervisor, which does not need it; the next worker finds all in order."""
    from webapp.runs.lifecycle import stop

    run, attempt, worker = live
    supervisor = studio.program(attempt, "--attempt")
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(5)
    before = run.series.get(name="reward", attempt=attempt).points
    time.sleep(3)
    assert run.series.get(name="reward", attempt=attempt).points > before
    studio.start_worker()
    time.sleep(6)
    run.refresh_from_db()
    assert run.state == "running"
    assert supervisor.is_running()
    stop(run, None, save=True)
    wait_for_end(studio, run, "stopped", seconds=TRUTH_S)


def test_a_new_worker_ends_what_outlived_the_old_one_and_its_supervisor(
    studio: Studio, live: tuple[Any, Any, Any]
) -> None:
    """The machine's services died together; a worker that starts again cleans up at once."""
    run, attempt, worker = live
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(5)
    studio.program(attempt, "--attempt").kill()
    assert studio.marked(attempt), "the trainer outlives both"
    studio.start_worker()
    wait_for_state(run, "failed", seconds=TRUTH_S)
    assert_nothing_left(studio, attempt)
    assert_resumes(studio, run)
