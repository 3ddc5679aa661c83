"""Several vLLM servers of one run, as its page and the page of hosts show them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio

pytestmark = [pytest.mark.browser, pytest.mark.slow]
expect.set_options(timeout=30_000)  # other tests may hold the processor

SEED = """
import json
from datetime import timedelta
from tests.webapp import seed
from webapp.hosts.models import Device, Lease
user = seed.make_user("serena")
run = seed.make_run(user, "three servers", steps=20)
attempt = run.current_attempt
host = seed.make_host("rack-of-servers")
Device.objects.filter(host=host).delete()
host.last_seen_at += timedelta(hours=1)
host.save()
attempt.host = host
attempt.save()
readings = {"util": 87.0, "memory_used_mib": 121_000, "temperature_c": 64.0, "power_w": 512.4}
for index in range(8):
    device = Device.objects.create(
        host=host, uuid=f"GPU-s{index}", kind="gpu", index=index, name="NVIDIA H200", memory_mib=143_000, **readings
    )
    if index < 7:
        replica = index // 2 if index < 6 else None
        purpose = "trainer" if replica is None else "server"
        Lease.objects.create(device=device, attempt=attempt, purpose=purpose, replica=replica)
for number, state, progress, restarts in ((0, "ready", "", 0), (1, "starting", "loading weights", 1), (2, "failed", "", 3)):
    attempt.servers.create(number=number, port=21840 + number, state=state, progress=progress, restarts=restarts)
print(json.dumps(str(run.pk)))
"""


GONE = """
from webapp.hosts.models import Device, Host, Lease
from webapp.runs.models import Attempt
devices = Device.objects.filter(host__name="rack-of-servers")
Lease.objects.filter(device__in=devices).delete()
devices.delete()
Attempt.objects.filter(host__name="rack-of-servers").update(host=None)
Host.objects.filter(name="rack-of-servers").delete()
"""


@pytest.fixture(scope="module")
def run(studio: Studio) -> Iterator[str]:
    """A run with three servers on a host that is gone again afterwards."""
    yield json.loads(studio.run_code(SEED))
    studio.run_code(GONE)


def test_a_run_lists_its_servers_and_hosts_say_which_gpu_is_whose(drawn: Drawn, run: str) -> None:
    drawn.sign_in("serena", seed.PASSWORD)
    page = drawn.go(f"/runs/{run}/")
    rows = page.locator("[data-testid=servers] tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("GPU 0, 1")
    expect(rows.nth(0)).to_contain_text("127.0.0.1:21840")
    expect(rows.nth(1)).to_contain_text("loading weights · 1 restart")
    expect(rows.nth(1).locator("a")).to_have_attribute("title", "server-1.log")
    drawn.look("run-servers")
    page = drawn.go("/hosts/")
    host = page.locator("[data-testid=host]", has_text="rack-of-servers")
    expect(host.locator("tbody tr").nth(2)).to_contain_text("vLLM server 1")
    drawn.look("hosts-servers")
