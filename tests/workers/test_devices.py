"""Devices of this machine: GPUs by UUID, or the one CPU slot; and who computes on them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

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


def test_a_host_registers_an_address_that_others_can_reach(
    studio: Studio, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    from workers import addresses, devices
    from workers.followers.meeting import interface_of, network

    monkeypatch.setenv("OFFBEAT_ADDRESS", "10.1.2.3")
    host = devices.register_host(HOST)
    assert host.address == "10.1.2.3"
    assert network(host, hosts=2) == {}, "an address behind NAT is on no interface of this machine"
    monkeypatch.delenv("OFFBEAT_ADDRESS")
    settings.CELERY_BROKER_URL = "redis://127.0.0.1:6379/0"
    found = addresses.own_address()
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    assert found in own
    assert found == "127.0.0.1" or not found.startswith("127."), "the way to a broker on this machine says nothing"
    host.address = "localhost"
    loopback = interface_of("127.0.0.1")
    assert network(host, hosts=2) == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert network(host, hosts=2) == {"GLOO_SOCKET_IFNAME": loopback}
    assert network(host, hosts=1) == {}


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


def test_the_environment_says_how_many_runs_share_the_processor(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    from webapp.hosts.models import Device
    from workers import devices

    if devices.discover(HOST)[0].kind == Device.Kind.GPU:
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("OFFBEAT_CPU_SLOTS", "2")
    devices.register_host(HOST)
    found = list(Device.objects.order_by("uuid").values_list("uuid", flat=True))
    assert found == [f"cpu:{HOST}", f"cpu:{HOST}#2"]
    assert devices.computing_on(found) == {}
    monkeypatch.setenv("OFFBEAT_CPU_SLOTS", "")
    devices.register_host(HOST)
    assert list(Device.objects.filter(present=True).values_list("uuid", flat=True)) == [f"cpu:{HOST}"]
    for text in ("two", "0", "65", "-1", "1.5"):
        monkeypatch.setenv("OFFBEAT_CPU_SLOTS", text)
        with pytest.raises(ValueError, match=f"OFFBEAT_CPU_SLOTS is '{text}'; a whole number from 1 to 64 is allowed"):
            devices.discover(HOST)


class Driver:
    """NVIDIA's management library, of a machine with `count` GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int) -> None:
        self.count = count

    def power(self, handle: int) -> int:
        """In milliwatts; the second GPU does not tell."""
        if handle == 1:
            raise self.NVMLError("not supported")
        return 512_400

    def __getattr__(self, name: str) -> object:
        answers = {
            "nvmlDeviceGetCount": lambda: self.count, "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}", "nvmlDeviceGetName": lambda handle: "H200",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=140 * 2**30, used=(3 + handle) * 2**30),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=40 + handle),
            "nvmlDeviceGetTemperature": lambda handle, sensor: 60 + handle, "NVML_TEMPERATURE_GPU": 0,
            "nvmlDeviceGetPowerUsage": self.power,
        }  # fmt: skip
        return answers[name]


@pytest.mark.parametrize(
    ("count", "wanted", "uuids"),
    [
        (1, "", ["GPU-0", "GPU-0#2"]),  # server and trainer share the only one
        (1, "1", ["GPU-0"]),
        (2, "", ["GPU-0", "GPU-1"]),
        (2, "3", ["GPU-0", "GPU-0#2", "GPU-0#3", "GPU-1", "GPU-1#2", "GPU-1#3"]),
    ],
)
def test_gpus_are_cut_into_slots(monkeypatch: pytest.MonkeyPatch, count: int, wanted: str, uuids: list[str]) -> None:
    from workers import devices

    monkeypatch.setattr(devices, "_nvml", lambda: nullcontext(Driver(count)))
    monkeypatch.setenv("OFFBEAT_GPU_SLOTS", wanted)
    found = devices.discover(HOST)
    assert [slot.uuid for slot in found] == uuids
    assert sum(slot.memory_mib for slot in found) == pytest.approx(count * 140 * 1024, abs=len(found))
    if len(found) > count:
        assert found[1].name == f"H200, slot 2 of {len(found) // count}"


def test_a_host_reports_how_busy_it_and_its_gpus_are(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from webapp.hosts.models import Device
    from workers import devices

    monkeypatch.setattr(devices, "_nvml", lambda: nullcontext(Driver(2)))
    monkeypatch.setenv("OFFBEAT_GPU_SLOTS", "2")
    host = devices.register_host(HOST)
    told = Device.objects.order_by("uuid").values_list("uuid", "util", "memory_used_mib", "temperature_c", "power_w")
    assert list(told) == [
        ("GPU-0", 40.0, 3072, 60.0, 512.4), ("GPU-0#2", 40.0, 3072, 60.0, 512.4),
        ("GPU-1", 41.0, 4096, 61.0, None), ("GPU-1#2", 41.0, 4096, 61.0, None),
    ]  # fmt: skip
    assert host.load is not None
    assert host.memory_free_mib is not None
    assert host.disk_free_mib is not None
    assert host.disk_mib is not None
    assert host.load >= 0
    assert 0 < host.memory_free_mib < host.memory_mib
    assert 0 < host.disk_free_mib < host.disk_mib


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
