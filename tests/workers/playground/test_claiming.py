"""A playground server gets what queued runs leave, all of it or nothing, and who waits for whom is said."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from tests.workers.conftest import HOST, Studio
from tests.workers.test_claiming import add_gpus, add_slots


@pytest.fixture
def ended_run(make_run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a run which is over."""
    from webapp.runs.models import Run

    def make(behaviour: str = "talks", **sections: Any) -> Any:
        run = make_run(behaviour, **sections)
        Run.objects.filter(pk=run.pk).update(state="completed")
        run.refresh_from_db()
        return run

    return make


@pytest.fixture
def cpu_host(studio: Studio) -> Any:
    from workers.devices import register_host

    return register_host(HOST)


def reason_of(thing: Any) -> str:
    thing.refresh_from_db()
    return thing.reason


def test_it_takes_the_slot_and_both_sides_say_so(
    cpu_host: Any, make_run: Callable[..., Any], ended_run: Callable[..., Any]
) -> None:
    from webapp.playground import services
    from workers import claiming, leases
    from workers.playground.claiming import claim

    run = ended_run()
    server = services.start(run, run.owner)
    assert claim(server)
    server.refresh_from_db()
    assert (server.state, server.reason) == ("starting", f"Starts on {HOST}.")
    assert [(lease.purpose, lease.held_by) for lease in server.leases.all()] == [("server", "the playground of talks")]
    assert leases.holding(server).device == "cpu"
    assert leases.lease_port(server, "vLLM server") == server.ports.get().port
    waiting = make_run("forever")
    assert claiming.claim_next(HOST) is None
    claiming.explain_queue()
    assert reason_of(waiting) == "Waits for the CPU slot, held by the playground of talks."
    leases.release(server)
    assert claiming.claim_next(HOST).run == waiting
    other = services.start(ended_run("other"), run.owner)
    assert not claim(other)
    assert reason_of(other) == f"Waits for a device of {HOST}, held by run forever."


def test_a_queued_run_comes_first(cpu_host: Any, make_run: Callable[..., Any], ended_run: Callable[..., Any]) -> None:
    from webapp.playground import services
    from workers.playground.claiming import claim

    run = ended_run()
    make_run("impatient")
    server = services.start(run, run.owner)
    assert not claim(server)
    assert reason_of(server) == f"Waits behind run impatient, which is in the queue for devices of {HOST}."
    assert not server.leases.exists()


def test_gpus_are_all_taken_or_none(
    studio: Studio, make_run: Callable[..., Any], ended_run: Callable[..., Any]
) -> None:
    from webapp.playground import services
    from workers import claiming, leases
    from workers.playground.claiming import claim

    add_gpus(4)
    run = ended_run(resources={"rollout_gpus": 2})
    servers = [services.start(run, run.owner), services.start(ended_run("small"), run.owner)]
    holder = make_run("holder", resources={"rollout_gpus": 2})
    assert claiming.claim_next(HOST).run == holder
    assert [claim(server) for server in servers] == [False, True]
    assert reason_of(servers[0]) == f"Waits for a device of {HOST}, held by run holder."
    assert len(leases.holding(servers[1]).server_gpus) == 1
    queued = make_run("queued", resources={"rollout_gpus": 2})
    claiming.explain_queue()
    assert reason_of(queued) == f"Waits for 3 GPUs; host {HOST} has 0 free of 4; 1 held by the playground of small."


def test_a_slot_of_a_shared_gpu_is_its_share(
    studio: Studio, ended_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from webapp.playground import services
    from workers import leases
    from workers.playground.claiming import claim

    add_slots(monkeypatch, gpus=1, slots=2)
    run = ended_run()
    server = services.start(run, run.owner)
    assert claim(server)
    held = leases.holding(server)
    assert (held.server_gpus, held.trainer_gpus, held.gpu_share) == (["GPU-0"], [], 0.5)
    assert leases.holders_of(["GPU-0"]) == {str(server.pk)}, "its processes are no strangers on that GPU"


def test_who_left_the_page_does_not_get_a_server_hours_later(cpu_host: Any, ended_run: Callable[..., Any]) -> None:
    from webapp.playground import services
    from workers.playground.claiming import claim_for

    run = ended_run()
    server = services.start(run, run.owner)
    type(server).objects.update(last_used_at=timezone.now() - timedelta(minutes=11))
    assert claim_for(HOST) == []
    assert "nobody looked at its page any more" in reason_of(server)
    assert server.state == "stopped"


def test_a_drained_host_takes_none(cpu_host: Any, ended_run: Callable[..., Any]) -> None:
    from webapp.playground import services
    from workers.playground.claiming import claim

    run = ended_run()
    server = services.start(run, run.owner)
    cpu_host.drained = True
    cpu_host.save()
    assert not claim(server)
    assert reason_of(server) == f"Waits: {HOST} takes nothing new (drained)."
