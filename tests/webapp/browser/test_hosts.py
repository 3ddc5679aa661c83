"""How busy hosts are, as a person sees it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
from datetime import timedelta
from tests.webapp import seed
from webapp.hosts.models import Device, Lease
user = seed.make_user("keeper")
run = seed.make_run(user, "a run with a name that is rather long for a table", steps=1)
host = seed.make_host("rack-with-eight")
Device.objects.filter(host=host).delete()
host.last_seen_at += timedelta(hours=1)  # it must not fall silent before it is looked at
host.save()
readings = {"util": 87.0, "memory_used_mib": 121_000, "temperature_c": 64.0, "power_w": 512.4}
for uuid, index, memory, told in (("GPU-ra", 0, 71_500, readings), ("GPU-ra#2", 0, 71_500, readings),
                                  ("GPU-rb", 1, 143_000, {**readings, "util": 0.0, "memory_used_mib": 900}),
                                  ("GPU-rc", 2, 143_000, {})):
    device = Device.objects.create(host=host, uuid=uuid, kind="gpu", index=index, name="NVIDIA H200", memory_mib=memory, **told)
    if index == 0:
        Lease.objects.create(device=device, attempt=run.current_attempt, purpose="both")
"""


GONE = """
from webapp.hosts.models import Device, Host, Lease
devices = Device.objects.filter(host__name="rack-with-eight")
Lease.objects.filter(device__in=devices).delete()
devices.delete()
Host.objects.filter(name="rack-with-eight").delete()
"""


@pytest.fixture(scope="module")
def rack(studio: Studio) -> Iterator[None]:
    """A host with GPUs, which is gone again afterwards: other tests of this studio choose among its hosts."""
    studio.run_code(SEED)
    yield
    studio.run_code(GONE)


def test_hosts_show_use_in_every_scheme_and_width(drawn: Drawn, rack: None) -> None:
    drawn.sign_in("keeper", seed.PASSWORD)
    page = drawn.go("/hosts/")
    host = page.locator("[data-testid=host]", has_text="rack-with-eight")
    expect(host.locator("[data-testid=gauges] dt")).to_have_text(["CPU load", "Memory", "Disk with the runs"])
    expect(host.locator("td.gauge").first).to_contain_text("87%")
    drawn.look("hosts-use")
