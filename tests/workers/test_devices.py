"""Devices of this machine: GPUs by UUID, or the one CPU slot; and who computes on them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.workers.conftest import HOST, Studio, wait_for


def test_a_machine_without_gpus_offers_one_cpu_slot(studio: Studio) -> None:
    from webapp.hosts.models import Device
    from workers import devices

    if devices.discover(HOST)[0].kind == Device.Kind.GPU:
        pytest.skip("this machine has GPUs")
    for _ in range(2):
        host = devices.register_host(HOST)
    slot = Device.objects.get()
    assert (slot.uuid, slot.kind, slot.host, slot.present) == (f"cpu:{HOST}", "cpu", host, True)
    assert slot.memory_mib == host.memory_mib > 1000
    assert host.alive


def test_a_device_that_is_gone_is_not_offered(studio: Studio) -> None:
    from webapp.hosts.models import Device
    from workers import devices

    host = devices.register_host(HOST)
    gone = Device.objects.create(host=host, uuid="GPU-gone", kind="gpu", name="GPU")
    devices.register_host(HOST)
    gone.refresh_from_db()
    assert not gone.present


def test_a_cpu_slot_has_no_computing_processes() -> None:
    from workers.devices import computing_on

    assert computing_on([f"cpu:{HOST}"]) == {}


@pytest.mark.gpu
def test_gpus_are_found_by_uuid_and_their_processes_seen() -> None:
    from workers import devices

    found = devices.discover(HOST)
    assert found
    assert all(device.uuid.startswith("GPU-") and device.memory_mib > 1000 for device in found)
    code = "import torch, time; x = torch.ones(2**20, device='cuda'); print('ready', flush=True); time.sleep(600)"
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        assert busy.stdout.readline() == b"ready\n"
        assert any(devices.computing_on([found[0].uuid]).values())
    finally:
        busy.kill()
        busy.wait()
    wait_for(lambda: not any(devices.computing_on([found[0].uuid]).values()), "the GPU to be free", 60)
