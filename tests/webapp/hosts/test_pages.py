"""Hosts: what they have, who holds it, what waits and why."""

from __future__ import annotations

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
