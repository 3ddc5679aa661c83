"""A host takes queued runs in order, with all their devices or none, and the others are told what they wait for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.conftest import HOST, REPOSITORY, Studio

CLAIM = """
import sys, django
django.setup()
from workers.claiming import claim_next
print("ready", flush=True)
sys.stdin.readline()
while attempt := claim_next("test-host"):
    print(attempt.pk, flush=True)
"""


def add_gpus(count: int, host: str = HOST) -> Any:
    from django.utils import timezone

    from webapp.hosts.models import Device, Host

    made, _ = Host.objects.get_or_create(name=host, defaults={"last_seen_at": timezone.now()})
    for index in range(count):
        Device.objects.create(
            host=made, uuid=f"GPU-{host}-{index}", kind="gpu", index=index, name="GPU", memory_mib=80_000
        )
    return made


@pytest.fixture
def cpu_host(studio: Studio) -> Any:
    from workers.devices import register_host

    return register_host(HOST)


def test_two_claimers_at_once_never_share_a_device(studio: Studio, make_run: Callable[..., Any]) -> None:
    """Six runs of two GPUs, five GPUs, two processes that race: two runs start, on four different GPUs."""
    from webapp.hosts.models import Lease
    from webapp.runs.models import Run

    add_gpus(5)
    runs = [make_run("complete") for _ in range(6)]
    claimers = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM], cwd=REPOSITORY, env=studio.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for claimer in claimers:
        assert claimer.stdout is not None
        assert claimer.stdout.readline() == "ready\n"
    answers = []
    for claimer in claimers:
        assert claimer.stdin is not None
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    for claimer in claimers:
        answers += claimer.communicate(timeout=60)[0].split()

    starting = set(Run.objects.filter(state="starting").values_list("pk", flat=True))
    assert starting == {runs[0].pk, runs[1].pk}, "first come, first served"
    assert len(answers) == len(set(answers)) == 2
    leases = Lease.objects.values_list("attempt__run", "purpose", "device__uuid")
    assert len({uuid for _, _, uuid in leases}) == len(leases) == 4
    for run in starting:
        assert sorted(purpose for owner, purpose, _ in leases if owner == run) == ["server", "trainer"]


def test_nothing_is_taken_when_one_device_is_missing(studio: Studio, make_run: Callable[..., Any]) -> None:
    from webapp.hosts.models import Lease
    from workers.claiming import claim_next, explain_queue

    host = add_gpus(3)
    first, big, small = make_run(), make_run(resources={"rollout_gpus": 2}), make_run()
    assert claim_next(HOST).run == first
    assert claim_next(HOST) is None, "the big run needs three; the small one behind it needs two and waits for its turn"
    assert Lease.objects.count() == 2
    explain_queue()
    big.refresh_from_db()
    small.refresh_from_db()
    assert big.reason == f"Waits for 3 GPUs; host {HOST} has 1 free of 3."
    assert small.reason == f"Waits for 2 GPUs; host {HOST} has 1 free of 3."
    Lease.objects.all().delete()
    explain_queue()
    small.refresh_from_db()
    assert small.reason == f"Waits for its turn behind run complete; host {HOST} has 3 free of 3."
    host.drained = True
    host.save()
    assert claim_next(HOST) is None
    explain_queue()
    big.refresh_from_db()
    assert big.reason == f"Waits: {HOST} takes no new runs (drained)."


def test_a_run_too_large_for_this_host_does_not_block_it(studio: Studio, make_run: Callable[..., Any]) -> None:
    from workers.claiming import claim_next

    add_gpus(2)
    make_run(resources={"rollout_gpus": 4})
    small = make_run()
    assert claim_next(HOST).run == small


def test_the_cpu_slot_is_one(studio: Studio, cpu_host: Any, make_run: Callable[..., Any]) -> None:
    from workers.claiming import claim_next, explain_queue
    from workers.leases import holding

    first, second = make_run("forever"), make_run("complete")
    attempt = claim_next(HOST)
    assert attempt.run == first
    assert attempt.state == "starting"
    assert attempt.host == cpu_host
    assert holding(attempt).device == "cpu"
    assert claim_next(HOST) is None
    explain_queue()
    second.refresh_from_db()
    assert second.reason == "Waits for the CPU slot, held by run forever."


def test_a_host_without_gpus_leaves_runs_to_one_that_has_some(
    studio: Studio, cpu_host: Any, make_run: Callable[..., Any]
) -> None:
    from datetime import timedelta

    from django.utils import timezone

    from workers.claiming import claim_next

    gpu_host = add_gpus(2, host="gpu-host")
    make_run()
    assert claim_next(HOST) is None
    gpu_host.last_seen_at = timezone.now() - timedelta(minutes=5)
    gpu_host.save()
    assert claim_next(HOST) is not None


def test_a_stored_spec_that_is_not_valid_any_more_fails_with_a_sentence(
    studio: Studio, cpu_host: Any, make_run: Callable[..., Any]
) -> None:
    from webapp.runs.models import Run
    from workers.claiming import claim_next

    broken, good = make_run(), make_run()
    Run.objects.filter(pk=broken.pk).update(spec={**broken.spec, "training": {"max_steps": -1}})
    assert claim_next(HOST).run == good
    broken.refresh_from_db()
    assert broken.state == "failed"
    assert broken.reason.startswith(
        "The stored spec is not valid any more: training.max_steps: Input should be greater"
    )


def test_a_leased_port_is_not_given_twice_nor_one_in_use(
    studio: Studio, cpu_host: Any, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    from workers import leases
    from workers.claiming import claim_next

    make_run()
    attempt = claim_next(HOST)
    # Three in a row that nobody uses, below those that the system gives away by itself.
    used = next(port for port in range(15_000, 20_000, 3) if all(map(leases._can_bind, range(port, port + 3))))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", used))
        listener.listen()
        monkeypatch.setattr(leases, "PORTS", range(used, used + 3))
        first, second = leases.lease_port(attempt, "a"), leases.lease_port(attempt, "b")
        assert {first, second} == {used + 1, used + 2}
        with pytest.raises(leases.NoPort, match="end what listens there"):
            leases.lease_port(attempt, "c")
    leases.release(attempt)
    assert leases.lease_port(attempt, "d") in range(used, used + 3)


def add_slots(monkeypatch: pytest.MonkeyPatch, gpus: int, slots: int) -> Any:
    """A host whose GPUs are cut into slots, as its worker would report it."""
    from workers import devices

    found = [devices.Found(f"GPU-{index}", "gpu", index, "H200", 140_000) for index in range(gpus)]
    cut = [slot for gpu in found for slot in devices._slots(gpu, slots)]
    monkeypatch.setattr(devices, "discover", lambda host: cut)
    return devices.register_host(HOST)


def test_runs_share_gpus_that_have_slots_and_each_knows_its_part(
    studio: Studio, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.claiming import claim_next, explain_queue
    from workers.leases import Holding, holding

    add_slots(monkeypatch, gpus=2, slots=3)
    runs = [make_run(), make_run(resources={"trainer_gpus": 2}), make_run()]
    claimed = [claim_next(HOST) for _ in range(3)]
    assert [attempt and attempt.run for attempt in claimed] == [*runs[:2], None]
    assert [holding(attempt) for attempt in claimed[:2]] == [
        Holding(["GPU-0"], ["GPU-1"], pytest.approx(1 / 3)),
        Holding(["GPU-0"], ["GPU-1", "GPU-0"], pytest.approx(1 / 3)),
    ]
    assert holding(claimed[1]).apart, "the first rank, which pushes, has a GPU of its own"
    explain_queue()
    runs[2].refresh_from_db()
    assert runs[2].reason == f"Waits for 2 GPUs; host {HOST} has 1 free of 6 slots."


def test_each_of_several_servers_has_gpus_of_its_own_and_the_leases_say_which(
    studio: Studio, make_run: Callable[..., Any]
) -> None:
    from workers.claiming import claim_next, explain_queue
    from workers.leases import holding

    add_gpus(6)
    wanted = {"server_replicas": 2, "rollout_gpus": 2}
    make_run(resources=wanted)
    waiting = make_run("waits", resources=wanted)
    attempt = claim_next(HOST)
    held = holding(attempt)
    assert [held.gpus_of(number, 2) for number in (0, 1)] == [
        [f"GPU-{HOST}-0", f"GPU-{HOST}-1"],
        [f"GPU-{HOST}-2", f"GPU-{HOST}-3"],
    ]
    assert held.trainer_gpus == [f"GPU-{HOST}-4"]
    assert held.apart
    leases = attempt.leases.order_by("device__index")
    assert [lease.use for lease in leases] == [*["vLLM server 0"] * 2, *["vLLM server 1"] * 2, "trainer"]
    explain_queue()
    waiting.refresh_from_db()
    assert waiting.reason == f"Waits for 5 GPUs; host {HOST} has 1 free of 6."


def test_the_only_gpu_of_a_host_serves_and_trains(
    studio: Studio, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.claiming import claim_next
    from workers.leases import holding

    add_slots(monkeypatch, gpus=1, slots=2)
    run = make_run()
    held = holding(claim_next(HOST))
    run.refresh_from_db()
    assert run.reason == f"Starts on {HOST} with 1 GPU."
    assert (held.server_gpus, held.trainer_gpus, held.gpu_share) == (["GPU-0"], ["GPU-0"], 0.5)
    assert not held.apart
    assert claim_next(HOST) is None


def test_who_holds_a_slot_may_compute_on_the_gpu_and_a_stranger_may_not(
    studio: Studio, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    from workers import devices, leases, processes
    from workers.claiming import claim_next

    add_slots(monkeypatch, gpus=1, slots=4)
    runs = [make_run(), make_run()]
    first = claim_next(HOST)
    ours = subprocess.Popen(["sleep", "60"], env={**os.environ, processes.MARK: str(first.pk)})
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        on_gpu = [ours.pid, stranger.pid]
        monkeypatch.setattr(devices, "computing_on", lambda uuids: {"GPU-0": on_gpu} if list(uuids) else {})
        assert claim_next(HOST) is None
        assert set(leases.busy_gpus(first)) == {"GPU-0", "GPU-0#2"}, "a stranger and its own process: not given back"
        on_gpu.remove(stranger.pid)
        second = claim_next(HOST)
        assert second.run == runs[1]
        assert leases.busy_gpus(second) == {}, "only the other attempt's process is left"
        assert leases.busy_gpus(first) == {"GPU-0": [ours.pid], "GPU-0#2": [ours.pid]}
    finally:
        for process in (ours, stranger):
            process.kill()
            process.wait()
