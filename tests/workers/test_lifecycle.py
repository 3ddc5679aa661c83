"""A run from the queue to its end, through the real Celery worker, supervisor and broker, with stand-in programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.conftest import Studio, wait_for
from tests.workers.stand_ins import SENTENCE

pytestmark = pytest.mark.slow


def wait_for_state(run: Any, *states: str, seconds: float = 30) -> None:
    def reached() -> bool:
        run.refresh_from_db()
        return run.state in states

    wait_for(reached, f"state {' or '.join(states)}", seconds)


def assert_nothing_left(studio: Studio, attempt: Any) -> None:
    """No process, device, port or shared-memory block of an attempt or a playground server."""
    from pathlib import Path

    assert [(process.pid, process.cmdline()) for process in studio.marked(attempt)] == []
    assert not attempt.leases.exists()
    assert not attempt.ports.exists()
    names = [
        line.split()[1] for line in (attempt.folder / "server-0.log").read_text().splitlines() if line[:6] == "block "
    ]
    assert [name for name in names if Path("/dev/shm", name.lstrip("/")).exists()] == []


def wait_for_end(studio: Studio, run: Any, *states: str, seconds: float = 30) -> Any:
    """Wait for the run's end and for its supervisor to be gone; nothing may be left then."""
    wait_for_state(run, *states, seconds=seconds)
    attempt = run.current_attempt
    wait_for(lambda: not studio.marked(attempt), "the supervisor's end", 20)
    assert_nothing_left(studio, attempt)
    return attempt


def test_a_run_completes(studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]) -> None:
    from webapp.metrics.models import Series
    from webapp.rollouts.models import StoredRollout

    run = make_run("checked")
    attempt = claim()
    wait_for_state(run, "running", "completed", seconds=90)
    attempt = wait_for_end(studio, run, "completed")
    assert run.reason == "All steps are done."
    assert (attempt.exit_code, attempt.state, attempt.server_restarts) == (0, "completed", 0)
    assert {series.name: series.points for series in Series.objects.filter(run=run)} == {"reward": 30, "loss": 30}
    assert sorted(StoredRollout.objects.filter(run=run).values_list("row_index", flat=True)) == list(range(1, 31))
    assert attempt.spool_offset == (attempt.folder / "spool.jsonl").stat().st_size
    assert [checkpoint.step for checkpoint in run.checkpoints.all()] == [30]
    states = [event.name for event in run.events.filter(name__startswith="state:")]
    assert states == ["state:queued", "state:starting", "state:running", "state:completed"]
    trainer_log = (attempt.folder / "trainer.log").read_text()
    for secret in ("CELERY_BROKER_URL", "DATABASE_URL", "DJANGO_SETTINGS_MODULE"):
        assert f"'{secret}'" not in trainer_log


def test_the_trainers_own_sentence_is_shown(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    run = make_run("fail")
    claim()
    attempt = wait_for_end(studio, run, "failed")
    assert run.reason == SENTENCE
    assert attempt.exit_code == 1


def test_a_crash_is_told_with_its_error_and_the_lines_that_show_it(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    run = make_run("crash")
    claim()
    wait_for_end(studio, run, "failed")
    assert run.reason == "The trainer ended with code 1: ValueError: this trainer can't go on"
    lines = run.events.get(name="last_lines").data["log"]
    assert lines[-1] == "ValueError: this trainer can't go on"


def test_a_server_that_does_not_start_fails_the_run(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    run = make_run("no-server")
    claim()
    wait_for_end(studio, run, "failed")
    assert "does not like this model" in run.reason
    assert not (run.current_attempt.folder / "trainer.log").exists()


@pytest.mark.parametrize(
    "sections, sentence",
    [
        ({"data": {"source": "/nowhere/prompts.jsonl"}}, "Dataset file /nowhere/prompts.jsonl does not exist on the "
         "training host."),
        ({"evaluation": {"every_steps": 5, "source": "/nowhere/held_out.csv"}}, "Evaluation: dataset file "
         "/nowhere/held_out.csv does not exist on the training host."),
        ({"agent": {"tools": ["nobody:wrote"]}}, "Tool 'nobody:wrote' is in module nobody, which is not allowed on the "
         "training host; its operator lists allowed modules in OFFBEAT_TOOL_MODULES (now empty)."),
        ({"model": {"path": "/nowhere/model"}}, "There is no folder /nowhere/model; give a folder with a config.json, a hub "
         "id, or smollm2-135m-instruct."),
    ],
)  # fmt: skip
def test_bad_input_costs_no_server(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any], sections: dict[str, Any], sentence: str
) -> None:
    run = make_run("checked", **sections)
    attempt = claim()
    wait_for_state(run, "failed", seconds=90)
    assert run.reason == sentence
    assert not (attempt.folder / "server-0.log").exists()
    wait_for(lambda: not studio.marked(attempt), "the supervisor's end", 5)
    assert not attempt.leases.exists()


@pytest.mark.parametrize(
    "behaviour, sentence",
    [
        ("full-disk", "The disk is full: free some space"),
        ("bug", "The supervisor met an error of its own; supervisor.log has it."),
    ],
)
def test_trouble_of_the_supervisor_itself_gives_the_devices_back(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any], behaviour: str, sentence: str
) -> None:
    run = make_run(behaviour)
    attempt = claim()
    wait_for_state(run, "failed")
    assert run.reason.startswith(sentence)
    assert not attempt.leases.exists()
    assert not attempt.ports.exists()
    assert "Traceback" in (attempt.folder / "supervisor.log").read_text()


def test_stop_and_save_then_resume(studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]) -> None:
    from webapp.runs.lifecycle import resume, stop

    run = make_run("forever")
    first = claim()
    wait_for_state(run, "running")
    wait_for(lambda: run.series.filter(name="reward", points__gt=5).exists(), "points", 10)
    stop(run, None, save=True)
    wait_for_end(studio, run, "stopped")
    assert run.reason == "Saved a checkpoint and stopped."
    checkpoint = run.checkpoints.get()
    resume(run, None)
    second = claim()
    assert second.resumed_from == checkpoint
    assert second.pk != first.pk
    wait_for_state(run, "running")
    trainer = wait_for(lambda: studio.marked(second) and studio.program(second, "stand_ins trainer"), "the trainer", 10)
    assert trainer.is_running()
    stop(run, None, save=False)
    wait_for_end(studio, run, "stopped")
    assert run.reason == "Stopped."


def test_a_trainer_that_hangs_on_stop_is_killed(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    from webapp.runs.lifecycle import stop

    run = make_run("hang")
    claim()
    wait_for_state(run, "running")
    stop(run, None, save=False)
    wait_for_state(run, "stopping")
    start = time.monotonic()
    attempt = wait_for_end(studio, run, "stopped")
    assert time.monotonic() - start < 15
    assert attempt.exit_code == -9


def test_a_shutdown_of_the_studio_saves_and_stops(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    run = make_run("forever")
    attempt = claim()
    wait_for_state(run, "running")
    attempt.refresh_from_db()
    studio.program(attempt, "--attempt").terminate()
    wait_for_end(studio, run, "stopped")
    assert run.reason == "The studio was shut down; resume to go on."
    assert run.checkpoints.count() == 1


def test_a_launch_while_the_broker_is_away_is_claimed_later(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    broker = studio.processes[0]
    broker.kill()
    broker.wait()
    run = make_run("complete")
    assert run.state == "queued"
    claim()
    wait_for_end(studio, run, "completed")


def test_through_broker_worker_and_beat(studio: Studio, make_run: Callable[..., Any]) -> None:
    """Launch by message, the reason in the queue, and the next run's start by beat."""
    first = make_run("forever")
    studio.start_worker()
    studio.start_beat()
    wait_for_state(first, "running")
    second = make_run("complete")

    def waits() -> bool:
        second.refresh_from_db()
        return second.reason == "Waits for the CPU slot, held by run forever."

    wait_for(waits, "the reason", 15)
    from webapp.runs.lifecycle import stop

    stop(first, None, save=False)
    wait_for_end(studio, first, "stopped")
    wait_for_end(studio, second, "completed")
