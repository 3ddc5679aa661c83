"""On a host with two GPUs: each part sees its own by UUID, and a GPU is not given to the next run while it is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.conftest import HOST, Studio, wait_for
from tests.workers.test_lifecycle import wait_for_end, wait_for_state

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
HOLD = "import torch, time; x = torch.ones(2**20, device='cuda'); print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def gpus(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from workers import claiming, devices

    found = [device.uuid for device in devices.discover(HOST)]
    if len(found) < 2:
        pytest.skip("needs two GPUs")
    assert all(uuid.startswith("GPU-") for uuid in found)
    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    devices.register_host(HOST)
    return found


def test_each_part_computes_on_its_own_gpu_until_the_run_ends(
    studio: Studio, gpus: list[str], make_run: Callable[..., Any]
) -> None:
    from webapp.runs.lifecycle import stop
    from workers import claiming, devices, leases

    run = make_run("gpu")
    (attempt,) = claiming.claim_for(HOST)
    held = leases.holding(attempt)
    assert (len(held.server_gpus), len(held.trainer_gpus)) == (1, 1)
    assert held.server_gpus != held.trainer_gpus
    wait_for_state(run, "running", seconds=120)
    assert held.server_gpus[0] in (attempt.folder / "server-0.log").read_text()
    assert held.trainer_gpus[0] in (attempt.folder / "trainer.log").read_text()
    assert all(devices.computing_on([*held.server_gpus, *held.trainer_gpus]).values())
    stop(run, None, save=True)
    wait_for_end(studio, run, "stopped", seconds=60)
    assert not any(devices.computing_on(gpus).values())


def test_each_of_two_servers_computes_on_its_own_gpu(
    studio: Studio, gpus: list[str], make_run: Callable[..., Any]
) -> None:
    from webapp.runs.lifecycle import stop
    from workers import claiming, leases

    if len(gpus) < 3:
        pytest.skip("needs three GPUs")
    run = make_run("gpu", resources={"server_replicas": 2})
    (attempt,) = claiming.claim_for(HOST)
    held = leases.holding(attempt)
    wait_for_state(run, "running", seconds=120)
    for number in (0, 1):
        assert held.gpus_of(number, 2)[0] in (attempt.folder / f"server-{number}.log").read_text()
    stop(run, None, save=True)
    wait_for_end(studio, run, "stopped", seconds=60)


def test_after_a_killed_supervisor_gpus_come_back_free(
    studio: Studio, gpus: list[str], make_run: Callable[..., Any]
) -> None:
    from webapp.hosts.models import Lease
    from workers import claiming, devices, reaper

    run = make_run("gpu")
    (attempt,) = claiming.claim_for(HOST)
    wait_for_state(run, "running", seconds=120)
    studio.program(attempt, "--attempt").kill()

    def all_given_back() -> bool:
        reaper.reap_host(HOST)
        return not Lease.objects.exists()

    wait_for(all_given_back, "the leases", 60)
    assert not any(devices.computing_on(gpus).values())
    run.refresh_from_db()
    assert run.state == "failed"


def test_a_gpu_that_a_stranger_uses_is_not_given(studio: Studio, gpus: list[str], make_run: Callable[..., Any]) -> None:
    from workers import claiming, devices

    make_run("complete", resources={"rollout_gpus": len(gpus) - 1})
    stranger = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"ready\n"
        assert claiming.claim_next(HOST) is None
    finally:
        stranger.kill()
        stranger.wait()
    wait_for(lambda: not any(devices.computing_on(gpus).values()), "free GPUs", 60)
    assert claiming.claim_next(HOST) is not None
