"""A playground server from the queue to its end, whoever ends it, with the real supervisor and a stand-in for vLLM."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from tests.workers.conftest import HOST, Studio, wait_for
from tests.workers.playground.test_claiming import ended_run
from tests.workers.test_lifecycle import assert_nothing_left, wait_for_state

__all__ = ["ended_run"]
pytestmark = pytest.mark.slow


@pytest.fixture
def serve(studio: Studio, ended_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that starts a server for a new run, as its page and the worker do."""
    from webapp.playground import services
    from workers import devices
    from workers.playground import claiming

    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")

    def start(behaviour: str = "talks", **sections: Any) -> Any:
        run = ended_run(behaviour, **sections)
        devices.register_host(HOST)
        server = services.start(run, run.owner)
        assert claiming.claim_for(HOST) == [server]
        return server

    return start


def wait_for_end(studio: Studio, server: Any, state: str) -> None:
    wait_for_state(server, state)
    wait_for(lambda: not studio.marked(server), "the supervisor's end", 5)
    assert_nothing_left(studio, server)


def test_it_serves_until_the_button(studio: Studio, serve: Callable[..., Any]) -> None:
    from webapp.playground import services
    from webapp.runs.lifecycle import Refused

    server = serve()
    wait_for_state(server, "running")
    assert server.ports.get().purpose == "vLLM server"
    with pytest.raises(Refused, match="has a server already"):
        services.start(server.run, server.owner)
    services.ask_to_stop(server, server.owner)
    wait_for_end(studio, server, "stopped")
    assert server.reason == "Stopped by ann."
    names = list(server.run.events.filter(name__startswith="playground").values_list("name", flat=True))
    assert names == ["playground_asked", "playground_stop", "playground_ended"]
    newer = services.start(server.run, server.owner)
    assert not server.folder.exists(), "the logs of the one before are gone"
    assert list(server.run.playground_servers.all()) == [newer]


def test_an_idle_one_ends(studio: Studio, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_PLAYGROUND_IDLE_MINUTES", "0.02")
    server = serve()
    wait_for_end(studio, server, "stopped")
    assert server.reason == "Nobody talked to it for 0.02 min."


def test_it_gives_way_to_a_queued_run_once_it_is_idle(
    studio: Studio, serve: Callable[..., Any], make_run: Callable[..., Any]
) -> None:
    from webapp.playground import services
    from workers import claiming

    server = serve()
    wait_for_state(server, "running")
    run = make_run("impatient")
    assert claiming.claim_next(HOST) is None
    for _ in range(5):  # somebody talks
        services.used(server)
        assert not wait_or_none(lambda: ended(server), 1.0)
    wait_for_end(studio, server, "stopped")
    assert server.reason == "Nobody talked to it for 2 s, and run impatient waits for devices of its host."
    assert claiming.claim_next(HOST).run == run


def ended(server: Any) -> bool:
    server.refresh_from_db()
    return server.ended_at is not None


def wait_or_none(condition: Callable[[], bool], seconds: float) -> bool:
    import time

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_it_ends_with_its_worker_and_with_the_studio(studio: Studio, serve: Callable[..., Any]) -> None:
    from webapp.hosts.models import Host

    server = serve()
    wait_for_state(server, "running")
    Host.objects.update(last_seen_at=timezone.now() - timedelta(seconds=61))
    wait_for_end(studio, server, "stopped")
    assert server.reason == f"The worker of {HOST} stopped, and nothing is served without it."

    Host.objects.update(last_seen_at=timezone.now())
    other = serve("other")
    wait_for_state(other, "running")
    studio.program(other, "--server").terminate()
    wait_for_end(studio, other, "stopped")
    assert other.reason == "The studio was shut down."


def test_what_keeps_it_from_starting_is_said_with_its_log(studio: Studio, serve: Callable[..., Any]) -> None:
    server = serve("no-server")
    wait_for_end(studio, server, "failed")
    assert "does not like this model" in server.reason
    assert server.log[-1] == "ValueError: the server does not like this model"


def test_a_checkpoint_that_was_deleted_meanwhile(studio: Studio, serve: Callable[..., Any], ended_run: Any) -> None:
    from webapp.checkpoints.models import Checkpoint
    from webapp.playground import services
    from workers import devices
    from workers.playground import claiming

    devices.register_host(HOST)
    run = ended_run("whole", lora={"enabled": False})
    checkpoint = Checkpoint.objects.create(
        run=run, attempt=run.current_attempt, step=5, kind="full", created_at=timezone.now()
    )
    checkpoint.folder.mkdir(parents=True)
    server = services.start(run, run.owner, checkpoint)
    checkpoint.folder.rmdir()
    claiming.claim_for(HOST)
    wait_for_state(server, "failed")
    assert not server.leases.exists()
    assert server.reason == "The checkpoint of step 5 is deleted; choose another one."


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_server_is_started_again_or_ends_it(studio: Studio, serve: Callable[..., Any], restarts: int) -> None:
    server = serve(server={"max_restarts": restarts})
    wait_for_state(server, "running")
    studio.program(server, "stand_ins server").kill()
    if restarts:
        event = wait_for(lambda: server.run.events.filter(name="playground_restarted").first(), "the event", 15)
        assert event.text.startswith("The vLLM server died and is started again: The server was killed (SIGKILL)")
        wait_for_state(server, "starting", "running")
        wait_for_state(server, "running")
        studio.program(server, "stand_ins server").kill()
    wait_for_end(studio, server, "failed")
    again = " again after 1 restart" if restarts else ""
    assert server.reason.startswith(f"The vLLM server died{again}: The server was killed (SIGKILL)")
    assert server.log


def test_a_killed_supervisor_leaves_nothing_behind(studio: Studio, serve: Callable[..., Any]) -> None:
    from workers.playground import reaping

    server = serve()
    wait_for_state(server, "running")
    assert reaping.reap_host(HOST) == []
    studio.program(server, "--server").kill()
    wait_for(lambda: reaping.reap_host(HOST), "the reaper", 5)
    server.refresh_from_db()
    assert (server.state, server.reason) == ("failed", reaping.KILLED)
    assert_nothing_left(studio, server)


def test_a_silent_host_is_judged_and_its_supervisor_ends_when_it_comes_back(
    studio: Studio, serve: Callable[..., Any]
) -> None:
    from workers.playground import reaping

    server = serve()
    wait_for_state(server, "running")
    supervisor = studio.program(server, "--server")
    supervisor.suspend()
    type(server).objects.update(heartbeat_at=timezone.now() - timedelta(seconds=70))
    reaping.reap_silent(HOST)
    server.refresh_from_db()
    assert server.state == "running", "a host judges its own servers by looking at their processes"
    reaping.reap_silent("another-host")
    server.refresh_from_db()
    assert server.state == "failed"
    assert server.leases.exists(), "nobody can see whether its processes still run"
    supervisor.resume()
    wait_for(lambda: not studio.marked(server), "the supervisor's end", 20)
    assert_nothing_left(studio, server)


def test_a_claim_whose_worker_died_gets_its_supervisor_later(
    studio: Studio, ended_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from webapp.playground import services
    from workers import devices
    from workers.playground import claiming, reaping

    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    devices.register_host(HOST)
    run = ended_run()
    server = services.start(run, run.owner)
    assert claiming.claim(server)
    reaping.reap_host(HOST)
    assert studio.marked(server) == []
    type(server).objects.update(started_at=timezone.now() - timedelta(seconds=25))
    reaping.reap_host(HOST)
    wait_for_state(server, "running")
    services.ask_to_stop(server, run.owner)
    wait_for_end(studio, server, "stopped")
