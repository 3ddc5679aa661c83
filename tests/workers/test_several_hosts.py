"""Runs whose trainer is on two hosts: devices of both or of none, and the end of both whoever dies. Both are this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.conftest import HOST, REPOSITORY, Studio, wait_for
from tests.workers.test_claiming import add_gpus
from tests.workers.test_lifecycle import wait_for_state

pytestmark = pytest.mark.slow
SECOND = "second-host"
LOADED_S = 120
"""Two supervisors and their programs start and end within this on a busy machine."""
TWO = {"trainer_hosts": 2}
CLAIM = """
import sys, django
django.setup()
from django.db import connection
from workers.claiming import claim_next
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    if attempt := claim_next(sys.argv[1]):
        print(attempt.pk, flush=True)
"""
FILL = """
import django
django.setup()
from django.utils import timezone
from webapp.accounts.models import User
from webapp.hosts.models import Device, Host
from webapp.runs.lifecycle import launch
from webapp.runs.models import Run
from trainer_core.spec import RunSpec
for name in ("a", "b"):
    host = Host.objects.create(name=name, last_seen_at=timezone.now() + timezone.timedelta(hours=1))
    for index in range(20):
        Device.objects.create(host=host, uuid=f"GPU-{name}-{index}", kind="gpu", index=index, name="GPU")
ann = User.objects.create_user("ann")
for number in range(30):
    spec = RunSpec(name=str(number), resources={"trainer_hosts": 1 + number % 2})
    launch(Run.objects.create(name=spec.name, owner=ann, spec=spec.model_dump(mode="json")), ann)
"""
COUNT = """
import django
django.setup()
from webapp.runs.models import Run
for run in Run.objects.order_by("queued_at"):
    held = run.current_attempt.leases.values_list("device__host__name", flat=True)
    print(run.state, run.spec["resources"]["trainer_hosts"], "".join(sorted(held)))
"""


def held(run: Any) -> list[tuple[str, str]]:
    """(host, purpose) of what the run holds."""
    found = run.current_attempt.leases.order_by("device__host__name", "purpose")
    return list(found.values_list("device__host__name", "purpose"))


def test_a_run_gets_devices_of_all_its_hosts_or_none(studio: Studio, make_run: Callable[..., Any]) -> None:
    from webapp.hosts.models import Lease
    from workers.claiming import claim_next, explain_queue

    add_gpus(4)
    add_gpus(1, SECOND)
    first, second = make_run(resources=TWO), make_run(resources=TWO)
    assert claim_next(SECOND) is None, "its GPU is not enough for the server as well"
    attempt = claim_next(HOST)
    assert attempt.run == first
    assert held(first) == [(SECOND, "trainer"), (HOST, "server"), (HOST, "trainer")]
    (follower,) = attempt.followers.all()
    assert (follower.host.name, follower.rank, follower.leases.count()) == (SECOND, 1, 1)
    first.refresh_from_db()
    assert first.reason == f"Starts on {HOST} and {SECOND} with 3 GPUs."

    assert claim_next(HOST) is None, "two GPUs are free here, and none there"
    assert Lease.objects.count() == 3
    explain_queue()
    second.refresh_from_db()
    assert second.reason == (
        f"Waits for 2 hosts, 2 GPUs of one and 1 of each other; host {SECOND} has 0 free of 1, host {HOST} has 2 free of 4."
    )


def test_each_part_gives_back_its_own(studio: Studio, make_run: Callable[..., Any]) -> None:
    from workers import leases
    from workers.claiming import claim_next

    add_gpus(3)
    add_gpus(2, SECOND)
    run = make_run(resources={"trainer_hosts": 2, "trainer_gpus": 2})
    attempt = claim_next(HOST)
    (follower,) = attempt.followers.all()
    mine, theirs = leases.holding(attempt), leases.holding(follower)
    assert (mine.device, len(mine.server_gpus), len(mine.trainer_gpus)) == ("cuda", 1, 2)
    assert (theirs.device, theirs.server_gpus, theirs.trainer_gpus) == (
        "cuda", [], [f"GPU-{SECOND}-0", f"GPU-{SECOND}-1"],
    )  # fmt: skip
    assert leases.holders_of([f"GPU-{SECOND}-0"]) == {str(follower.pk)}
    leases.release(attempt)
    assert held(run) == [(SECOND, "trainer")] * 2, "nobody here sees whether processes are still on them"
    leases.release(follower)
    assert held(run) == []


def test_a_host_that_can_only_follow_is_kept_for_the_run_that_waits_for_it(
    studio: Studio, make_run: Callable[..., Any]
) -> None:
    from webapp.hosts.models import Device
    from workers.claiming import claim_next

    add_gpus(3)
    add_gpus(2, SECOND)
    holder = make_run()
    assert claim_next(HOST).run == holder
    make_run(resources={"trainer_hosts": 2, "rollout_gpus": 2})
    small = make_run()
    assert claim_next(SECOND) is None, "the large run is first, and needs a GPU of this host"
    Device.objects.filter(host__name=HOST).update(present=False)
    assert claim_next(SECOND).run == small, "without the other host it can't begin at all"


@pytest.mark.parametrize("why", ["silent", "drained", "no GPU"])
def test_a_host_that_takes_no_runs_is_no_second_one(studio: Studio, make_run: Callable[..., Any], why: str) -> None:
    from django.utils import timezone

    from webapp.hosts.models import Device, Host
    from workers.claiming import claim_next

    add_gpus(2)
    add_gpus(1, SECOND)
    changes = {"silent": {"last_seen_at": timezone.now() - timezone.timedelta(minutes=5)}, "drained": {"drained": True}}
    Host.objects.filter(name=SECOND).update(**changes.get(why, {"load": 0}))
    if why == "no GPU":
        Device.objects.filter(host__name=SECOND).update(kind="cpu")
    make_run(resources=TWO)
    alone = make_run()
    assert claim_next(HOST).run == alone


def test_two_hosts_that_claim_over_both_at_once_neither_share_nor_wait_for_one_another(studio: Studio) -> None:
    """On PostgreSQL, where each locks rows: two claimers, runs over one and two hosts, until nothing is free."""
    from bench.support.postgresql import Unavailable, cluster

    try:
        with cluster() as database:
            env = {**studio.env, **database}

            def python(*arguments: str) -> str:
                done = subprocess.run(
                    [sys.executable, *arguments], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True
                )
                return done.stdout

            python("manage.py", "migrate", "-v", "0", "--skip-checks")
            python("-c", FILL)
            claimers = [
                subprocess.Popen(
                    [sys.executable, "-c", CLAIM, name], cwd=REPOSITORY, env=env, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
                for name in ("a", "b")
            ]  # fmt: skip
            for claimer in claimers:
                assert claimer.stdout is not None
                assert claimer.stdout.readline() == "ready\n"
            for claimer in claimers:
                assert claimer.stdin is not None
                claimer.stdin.write("go\n")
                claimer.stdin.flush()
            said = [claimer.communicate(timeout=120) for claimer in claimers]
            rows = [line.split() for line in python("-c", COUNT).splitlines()]
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert not any("eadlock" in errors or "Traceback" in errors for _, errors in said), said
    started = [row for row in rows if row[0] == "starting"]
    assert len(started) == sum(len(claimed.split()) for claimed, _ in said)
    for _, hosts, where in started:
        assert (where in ("aa", "bb")) if hosts == "1" else where in ("aab", "abb")
    assert all(len(row) == 2 for row in rows if row[0] == "queued"), "nothing is held for a run that waits"
    least, most = sorted(20 - sum(row[2].count(host) for row in started) for host in "ab")
    first_hosts = next(row[1] for row in rows if row[0] == "queued")
    assert least >= 0
    assert most < 2 or (first_hosts == "2" and least < 1), "the first that waits does not fit"


# ---- from the start to the end, with stand-in programs -----------------------------------------------------------------


@pytest.fixture
def started(studio: Studio, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Claims a run over both hosts, as their workers do; returns its attempt and follower."""
    from webapp.hosts.models import Host
    from workers import claiming, devices
    from workers.followers import starting

    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    monkeypatch.setattr(starting, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    for name in (HOST, SECOND):
        devices.register_host(name)
    Host.objects.update(address="127.0.0.1")

    def start(behaviour: str) -> Any:
        make_run(behaviour, resources=TWO)
        (attempt,) = claiming.claim_for(HOST)
        starting.start_for(SECOND)
        return attempt, attempt.followers.get()

    return start


def wait_for_end(studio: Studio, attempt: Any, follower: Any, state: str) -> str:
    """The run's reason once it has ended; nothing may be left of either host then."""
    from webapp.hosts.models import Lease, PortLease

    wait_for_state(attempt.run, state, seconds=LOADED_S)
    wait_for(lambda: not studio.marked(attempt) and not studio.marked(follower), "the end of all processes", 60)
    assert not Lease.objects.exists()
    assert not PortLease.objects.exists()
    follower.refresh_from_db()
    attempt.run.refresh_from_db()
    return str(attempt.run.reason)


def test_a_run_over_two_hosts_completes(studio: Studio, started: Callable[..., Any]) -> None:
    attempt, follower = started("complete")
    assert wait_for_end(studio, attempt, follower, "completed") == "All steps are done."
    assert (follower.state, follower.exit_code) == ("completed", 0)
    assert "has met the first one" in follower.log("trainer").read_text()
    assert attempt.hosts == [HOST, SECOND]
    assert [run_event.name for run_event in attempt.run.events.filter(level="error")] == []


def test_a_rank_that_fails_to_start_on_the_second_host_fails_the_run(
    studio: Studio, started: Callable[..., Any]
) -> None:
    attempt, follower = started("crash-there")
    reason = wait_for_end(studio, attempt, follower, "failed")
    assert reason == f"The trainer's part on host {SECOND} ended with code 1: ValueError: this rank can't go on"
    event = attempt.run.events.get(name="host_failed")
    assert event.data["log"][-1] == "ValueError: this rank can't go on"


def test_a_killed_supervisor_of_the_second_host_fails_the_run_by_name(
    studio: Studio, started: Callable[..., Any]
) -> None:
    from workers.followers import reaping

    attempt, follower = started("forever")
    wait_for_state(attempt.run, "running", seconds=LOADED_S)
    studio.program(follower, "stand_ins --follower").kill()
    wait_for(lambda: reaping.reap_host(SECOND) == [follower], "the reaper", 10)
    reason = wait_for_end(studio, attempt, follower, "failed")
    assert reason.startswith(f"The supervisor of host {SECOND}, which has a part of the trainer, was killed")
    assert reaping.reap_host(SECOND) == []


def test_a_killed_supervisor_of_the_first_host_ends_the_second(studio: Studio, started: Callable[..., Any]) -> None:
    from workers import reaper

    attempt, follower = started("forever")
    wait_for_state(attempt.run, "running", seconds=LOADED_S)
    studio.program(attempt, "stand_ins --attempt").kill()
    wait_for(lambda: reaper.reap_host(HOST) == [attempt], "the reaper", 10)
    assert "supervisor was killed" in wait_for_end(studio, attempt, follower, "failed")
    assert follower.state == "stopped"
    assert reaper.reap_host(HOST) == []


def test_a_second_host_that_goes_silent_fails_the_run_and_keeps_its_devices(
    studio: Studio, started: Callable[..., Any]
) -> None:
    from workers.followers import reaping

    attempt, follower = started("forever")
    wait_for_state(attempt.run, "running", seconds=LOADED_S)
    for process in studio.marked(follower):
        process.suspend()
    wait_for_state(attempt.run, "failed", seconds=60)
    assert f"Host {SECOND}, which has a part of the trainer, has not reported" in attempt.run.reason
    assert held(attempt.run) == [(SECOND, "trainer")], "nobody can see whether its processes still run"
    for process in studio.marked(follower):
        process.resume()
    wait_for(lambda: not studio.marked(follower), "its end, now that it knows", 30)
    reaping.reap_host(SECOND)
    assert held(attempt.run) == []


@pytest.mark.parametrize("save", [True, False])
def test_stop_reaches_both(studio: Studio, started: Callable[..., Any], save: bool) -> None:
    from webapp.runs.lifecycle import stop

    attempt, follower = started("forever")
    wait_for_state(attempt.run, "running", seconds=LOADED_S)
    stop(attempt.run, None, save=save)
    assert wait_for_end(studio, attempt, follower, "stopped") in ("Stopped.", "Saved a checkpoint and stopped.")
    assert attempt.run.checkpoints.count() == save


def test_a_shutdown_of_the_second_host_saves_and_stops(studio: Studio, started: Callable[..., Any]) -> None:
    attempt, follower = started("forever")
    wait_for_state(attempt.run, "running", seconds=LOADED_S)
    studio.program(follower, "stand_ins --follower").terminate()
    assert wait_for_end(studio, attempt, follower, "stopped") == "Saved a checkpoint and stopped."


def test_a_run_that_ends_before_the_second_host_began_leaves_nothing_there(
    studio: Studio, make_run: Callable[..., Any]
) -> None:
    from webapp.runs.lifecycle import change_state
    from webapp.runs.models import ACTIVE, State
    from workers import leases
    from workers.claiming import claim_next
    from workers.followers import reaping

    add_gpus(2)
    add_gpus(1, SECOND)
    run = make_run(resources=TWO)
    attempt = claim_next(HOST)
    change_state(run, ACTIVE, State.FAILED, "It did not start.", attempt=attempt)
    leases.release(attempt)
    assert [follower.host.name for follower in reaping.reap_host(SECOND)] == [SECOND]
    assert held(run) == []
