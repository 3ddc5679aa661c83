"""Hosts: what they have, who holds it, what waits and why."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.hosts.models import Device, Host
from webapp.runs.models import State

pytestmark = pytest.mark.django_db


def test_without_hosts_the_page_says_what_to_do(as_ada: Client) -> None:
    page = as_ada.get("/hosts/").content.decode()
    assert "No host yet" in page
    assert "Nothing waits." in page


def test_a_device_names_the_run_that_holds_it(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, "holder", steps=1, lease=True)
    host = Host.objects.get()
    Device.objects.create(host=host, uuid="GPU-1", kind="gpu", index=1, name="H200", present=False)
    page = as_ada.get("/hosts/").content.decode()
    assert f'href="/runs/{run.pk}/"' in page
    assert "server and trainer" in page
    assert "not seen any more" in page
    assert "1 device, 1 busy" in page


def test_queued_runs_say_why_they_wait(as_ada: Client, ada: User) -> None:
    seed.make_run(ada, state=State.QUEUED, steps=0, reason="Waits for 2 GPUs on host a.")
    assert "Waits for 2 GPUs on host a." in as_ada.get("/hosts/").content.decode()


def test_a_host_that_went_silent_is_shown_as_such(as_ada: Client) -> None:
    seed.make_host()
    Host.objects.update(last_seen_at=timezone.now() - timedelta(minutes=5))
    assert "has not reported for a while" in as_ada.get("/hosts/").content.decode()


def test_addresses_are_shown_where_there_are_several_hosts(as_ada: Client) -> None:
    seed.make_host("alpha")
    Host.objects.update(address="10.0.0.1")
    assert "10.0.0.1" not in as_ada.get("/hosts/").content.decode()
    seed.make_host("beta")
    assert "at 10.0.0.1" in as_ada.get("/hosts/").content.decode()


def gpu_host() -> Host:
    """A host with a GPU in two slots, and one that does not tell its use."""
    host = seed.make_host("rack")
    Device.objects.filter(host=host).update(present=False)
    readings = {"util": 87.0, "memory_used_mib": 70_000, "temperature_c": 64.0, "power_w": 512.4}
    for uuid, index, told in (("GPU-a", 0, readings), ("GPU-a#2", 0, readings), ("GPU-b", 1, {})):
        Device.objects.create(
            host=host, uuid=uuid, kind="gpu", index=index, name="H200", memory_mib=70_000 if told else 140_000, **told
        )
    return host


def test_readings_of_a_gpu_stand_once_beside_its_slots(as_ada: Client) -> None:
    gpu_host()
    page = as_ada.get("/hosts/").content.decode()
    assert page.count("87%") == page.count("64 °C") == page.count("512 W") == 1
    assert 'rowspan="2"' in page
    assert "68.4 GiB <span" in page
    assert "of 137 GiB" in page
    assert re.search(r'aria-label="Memory in use"[^>]*aria-valuenow="50.0"', page)
    assert "<b>1.4</b> on 2 cores" in page
    assert "<b>30.3 GiB</b> free of 469 GiB" in page
    assert "meter full" in page  # the disk


def test_a_silent_host_shows_no_old_readings(as_ada: Client) -> None:
    gpu_host()
    Host.objects.update(last_seen_at=timezone.now() - timedelta(minutes=5))
    page = as_ada.get("/hosts/").content.decode()
    assert "H200" in page
    assert "°C" not in page
    assert 'data-testid="gauges"' not in page


def test_only_admins_drain_a_host(as_ada: Client, as_admin: Client) -> None:
    host = seed.make_host()
    assert as_ada.post(f"/hosts/{host.pk}/drain/", {"drained": "1"}).status_code == 403
    said = as_admin.post(f"/hosts/{host.pk}/drain/", {"drained": "1"}, follow=True).content.decode()
    assert "takes no new runs" in said
    assert Host.objects.get().drained
    as_admin.post(f"/hosts/{host.pk}/drain/", {"drained": "0"})
    assert not Host.objects.get().drained


def test_the_page_asks_a_fixed_number_of_queries(as_ada: Client, ada: User, django_assert_max_num_queries: Any) -> None:
    host = seed.make_host()
    for index in range(20):
        Device.objects.create(host=host, uuid=f"GPU-{index}", kind="gpu", index=index, name="H200")
    with django_assert_max_num_queries(6):
        as_ada.get("/hosts/")
