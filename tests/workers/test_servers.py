"""Several vLLM servers of one run: started together, watched each for itself, and all of them gone at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.workers.conftest import Studio, wait_for
from tests.workers.test_lifecycle import assert_nothing_left, wait_for_end, wait_for_state

pytestmark = pytest.mark.slow
START_S = 300


def on_port(studio: Studio, attempt: Any, port: int) -> psutil.Process:
    return studio.program(attempt, f"stand_ins server {port} ")


def test_each_has_its_port_and_log_one_is_started_again_and_all_are_stopped(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    from webapp.runs.lifecycle import stop

    run = make_run("forever", resources={"server_replicas": 3})
    attempt = claim()
    wait_for_state(run, "running", seconds=START_S)
    servers = list(attempt.servers.all())
    assert [(server.number, server.state, server.restarts) for server in servers] == [
        (number, "ready", 0) for number in range(3)
    ]
    assert {server.port for server in servers} == set(attempt.ports.values_list("port", flat=True))
    before = [on_port(studio, attempt, server.port) for server in servers]
    assert all((attempt.folder / server.log_name).read_text().startswith("block ") for server in servers)

    before[1].kill()
    wait_for(lambda: attempt.servers.filter(number=1, restarts=1, state="ready").exists(), "the second server", START_S)
    assert on_port(studio, attempt, servers[1].port).pid != before[1].pid
    assert [before[number].is_running() for number in (0, 2)] == [True, True]
    event = attempt.events.get(name="server_restarted")
    assert event.text.startswith("vLLM server 1 died and is started again: ")
    attempt.refresh_from_db()
    run.refresh_from_db()
    assert (attempt.server_restarts, run.state) == (1, "running")

    stop(run, None, save=False)
    wait_for_end(studio, run, "stopped")
    assert_nothing_left(studio, attempt)
    assert set(attempt.servers.values_list("state", flat=True)) == {"ended"}


def test_one_that_does_not_start_fails_the_run_with_its_sentence(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    run = make_run("one-server", resources={"server_replicas": 2})
    attempt = claim()
    wait_for_end(studio, run, "failed", seconds=START_S)
    assert run.reason.endswith(
        " did not start: The server ended with code 1: ValueError: there is room for one server."
    )
    assert run.reason.startswith(("vLLM server 0 ", "vLLM server 1 "))
    assert not (attempt.folder / "trainer.log").exists()
    assert_nothing_left(studio, attempt)


def test_one_that_keeps_dying_is_given_up_and_the_last_one_ends_the_run(
    studio: Studio, make_run: Callable[..., Any], claim: Callable[[], Any]
) -> None:
    run = make_run("forever", resources={"server_replicas": 2}, server={"max_restarts": 0})
    attempt = claim()
    wait_for_state(run, "running", seconds=START_S)
    first, second = attempt.servers.all()
    on_port(studio, attempt, first.port).kill()
    wait_for(lambda: attempt.servers.filter(number=0, state="failed").exists(), "the first one's end", 30)
    event = attempt.events.get(name="server_given_up")
    assert event.text.startswith("vLLM server 0 died: ")
    assert event.text.endswith("The run goes on with the others; resume it to have all servers again.")
    run.refresh_from_db()
    assert run.state == "running"
    on_port(studio, attempt, second.port).kill()
    wait_for_end(studio, run, "failed")
    assert run.reason.startswith("vLLM server 1 died: ")
