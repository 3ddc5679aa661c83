"""Hosts that fall silent, supervisors that come back, and devices that are not free though a run ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest

from tests.workers.conftest import HOST, Studio, wait_for
from tests.workers.test_lifecycle import wait_for_end, wait_for_state

pytestmark = pytest.mark.slow


@pytest.fixture
def claimed(studio: Studio, make_run: Callable[..., Any]) -> Any:
    """An attempt of this host that was claimed; nothing runs yet."""
    from workers import claiming, devices

    devices.register_host(HOST)
    make_run("forever")
    return claiming.claim_next(HOST)


def age(attempt: Any, seconds: float, *columns: str) -> None:
    from django.utils import timezone

    from webapp.runs.models import Attempt

    then = timezone.now() - timedelta(seconds=seconds)
    Attempt.objects.filter(pk=attempt.pk).update(**dict.fromkeys(columns, then))
    attempt.refresh_from_db()


def test_a_silent_host_loses_its_runs_but_keeps_its_devices(studio: Studio, claimed: Any) -> None:
    from workers import reaper

    age(claimed, 50, "heartbeat_at")
    assert reaper.reap_silent("another-host") == []
    age(claimed, 70, "heartbeat_at")
    assert reaper.reap_silent(HOST) == [], "a host judges its own runs by looking at their processes"
    assert reaper.reap_silent("another-host") == [claimed]
    claimed.run.refresh_from_db()
    assert claimed.run.state == "lost"
    assert claimed.run.reason.startswith(f"Host {HOST} has not reported for 60 s.")
    assert claimed.leases.count() == 1, "nobody can see whether its processes still run"


def test_a_lost_run_whose_supervisor_lives_is_taken_back(
    studio: Studio, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from webapp.runs.lifecycle import stop
    from workers import claiming, devices, reaper

    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    devices.register_host(HOST)
    run = make_run("forever")
    (attempt,) = claiming.claim_for(HOST)
    wait_for_state(run, "running")
    age(attempt, 600, "heartbeat_at")
    assert reaper.reap_silent("another-host") == [attempt]
    wait_for_state(run, "running")
    attempt.refresh_from_db()
    assert (attempt.state, attempt.ended_at, run.ended_at) == ("running", None, None)
    names = list(run.events.filter(name__startswith="state:").values_list("name", flat=True))
    assert names[-2:] == ["state:lost", "state:running"]
    stop(run, None, save=True)
    wait_for_end(studio, run, "stopped")


def test_a_supervisor_gives_up_when_the_run_was_resumed_elsewhere(
    studio: Studio, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends its processes and gives its devices back, and leaves the run to the newer attempt."""
    from webapp.runs.lifecycle import resume
    from workers import claiming, devices, processes, reaper

    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    devices.register_host(HOST)
    run = make_run("forever")
    (attempt,) = claiming.claim_for(HOST)
    wait_for_state(run, "running")
    attempt.refresh_from_db()
    supervisor = psutil.Process(attempt.supervisor_pid)
    supervisor.suspend()
    age(attempt, 600, "heartbeat_at")
    reaper.reap_silent("another-host")
    run.refresh_from_db()
    newer = resume(run, None)
    supervisor.resume()
    wait_for(lambda: not processes.marked(str(attempt.pk)), "the end of the old attempt", 20)
    run.refresh_from_db()
    attempt.refresh_from_db()
    newer.refresh_from_db()
    assert (run.state, newer.state, attempt.state) == ("queued", "queued", "stopped")
    assert not attempt.leases.exists()


def test_a_claim_whose_worker_died_gets_its_supervisor_later(
    studio: Studio, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from webapp.runs.lifecycle import stop
    from workers import claiming, reaper

    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    reaper.reap_host(HOST)
    assert studio.marked(claimed) == [], "the worker may just be about to start it"
    age(claimed, 25, "started_at")
    reaper.reap_host(HOST)
    wait_for_state(claimed.run, "running")
    stop(claimed.run, None, save=False)
    wait_for_end(studio, claimed.run, "stopped")


def test_a_supervisor_that_never_comes_up_fails_the_run(studio: Studio, claimed: Any) -> None:
    from workers import reaper

    claimed.folder.mkdir(parents=True)
    (claimed.folder / "supervisor.log").write_text("ImportError: no module of that name\n")
    age(claimed, 200, "started_at")
    reaper.reap_host(HOST)
    claimed.run.refresh_from_db()
    assert claimed.run.state == "failed"
    assert "supervisor did not start" in claimed.run.reason
    assert claimed.run.events.get(name="last_lines").data["log"] == ["ImportError: no module of that name"]
    assert not claimed.leases.exists()


def test_a_gpu_that_is_still_used_stays_leased(studio: Studio, claimed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's answer is played here; test_devices.py asks the real one on a GPU host."""
    from webapp.hosts.models import Device
    from webapp.runs.models import Attempt
    from workers import devices, processes, reaper

    Device.objects.update(uuid="GPU-1", kind="gpu")
    Attempt.objects.filter(pk=claimed.pk).update(supervisor_pid=2**22 - 1, supervisor_create_time=1.0)
    marked = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**studio.env, processes.MARK: str(claimed.pk)}
    )
    wait_for(lambda: processes.marked(str(claimed.pk)), "the marked process", 5)
    monkeypatch.setattr(devices, "computing_on", lambda uuids: {uuid: [marked.pid] for uuid in uuids})
    reaper.reap_host(HOST)
    assert marked.wait(5) == -9
    claimed.run.refresh_from_db()
    assert claimed.run.state == "failed"
    assert str(marked.pid) in claimed.run.events.get(name="device_busy").text
    assert claimed.leases.count() == 1
    reaper.reap_host(HOST)
    assert claimed.leases.count() == 1
    monkeypatch.setattr(devices, "computing_on", lambda uuids: {uuid: [] for uuid in uuids})
    reaper.reap_host(HOST)
    assert not claimed.leases.exists()
