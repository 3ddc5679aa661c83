"""Large pages in a real browser, judged not by the clock: charts mounted, requests, bytes, the main thread's work."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
import json
from bench.support import pages
from tests.webapp import seed
pages.RUNS, pages.LOG_BYTES = 200, 8 * 2**20
print(json.dumps(vars(pages.seed(seed.make_user("barbara")))))
"""
MAIN_THREAD_S = 1.5
"""Of processor time, until what is in view of 60 charts is drawn."""


@pytest.fixture(scope="module")
def runs(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


@pytest.fixture
def barbara(web: Watched, runs: dict[str, str]) -> Watched:
    web.sign_in("barbara", seed.PASSWORD)
    return web


def open_stages(page: Page) -> None:
    page.wait_for_selector("details.stage", state="attached")
    page.evaluate("document.querySelectorAll('details.stage').forEach((stage) => { stage.open = true; })")


def mounted(page: Page) -> int:
    return page.evaluate("document.querySelectorAll('.chart .main-svg:first-child').length")


def test_sixty_charts_mount_as_they_come_into_view(barbara: Watched, runs: dict[str, str]) -> None:
    page = barbara.page
    page.set_default_timeout(60_000)
    asked: list[Any] = []
    page.on("response", lambda answer: asked.append(answer) if re.search("/chart[?](?!.*after=)", answer.url) else None)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    barbara.go(f"/runs/{runs['charts']}/")
    page.wait_for_selector("#charts .chart .main-svg")
    open_stages(page)
    page.evaluate("document.querySelector('details.stage:last-of-type').scrollIntoView()")
    page.wait_for_selector("details.stage:last-of-type .chart .main-svg")
    page.wait_for_timeout(300)
    assert page.locator(".chart").count() >= 60
    assert mounted(page) < 55  # of 82, those near the window
    used = {item["name"]: item["value"] for item in devtools.send("Performance.getMetrics")["metrics"]}
    assert used["TaskDuration"] < MAIN_THREAD_S
    names = [name for answer in asked for name in parse_qs(urlsplit(answer.url).query)["metric"]]
    assert len(names) == len(set(names))  # each is asked for once, many in one request
    assert len(asked) <= 8
    assert max(len(answer.body()) for answer in asked) < 4e6
    for chart in page.locator("details.stage .chart").all()[::6]:  # scrolled by, every one of them is drawn
        chart.scroll_into_view_if_needed()
        expect(chart.locator(".main-svg").first).to_be_attached()


def test_two_thousand_metrics_are_found_by_name(barbara: Watched, runs: dict[str, str]) -> None:
    page = barbara.page
    page.set_default_timeout(60_000)
    barbara.go(f"/runs/{runs['names']}/")
    page.fill("#all-metrics input[type=search]", "layer.1234/")
    chart = page.locator("#all-metrics .chart:visible")
    expect(chart).to_have_count(1)
    expect(chart.locator(".main-svg").first).to_be_attached()
    assert mounted(page) < 10


def test_a_large_log_is_searched_whole(barbara: Watched, runs: dict[str, str]) -> None:
    page = barbara.page
    barbara.go(f"/runs/{runs['log']}/logs/")
    expect(page.locator("#log-lines")).to_contain_text("the only line of its kind")
    page.fill("#log-filter", "ONLY LINE")
    page.press("#log-filter", "Enter")
    hits = page.locator("[data-testid=log-hits] button")
    expect(hits).to_have_text(["the only line of its kind"])
    expect(page.locator("#log-status")).to_contain_text("1 line with “ONLY LINE” in the whole log")
    barbara.shoot("log-search")
    page.fill("#log-filter", "everything goes on")
    page.press("#log-filter", "Enter")
    expect(hits).to_have_count(1000)
    expect(page.locator("#log-status")).to_contain_text("the search stops here")
    hits.nth(5).click()
    expect(page.locator("#log-lines .hit")).to_contain_text("everything goes on")
    expect(page.locator("#log-newer")).to_be_visible()
    assert page.locator("#log-lines > div").count() <= 8000
    page.click("#log-newer")
    expect(page.locator("#log-lines > div")).not_to_have_count(0)


ADMIN = """
from tests.webapp import seed
from webapp.metrics.models import Retention
from webapp.accounts.models import User
if not User.objects.filter(username="edsger").exists():
    seed.make_user("edsger", is_superuser=True)
Retention.objects.update_or_create(pk=1, defaults={"superseded_days": 30})
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_of_stored_points_is_readable(
    web: Watched, studio: Studio, runs: dict[str, str], theme: str, width: int
) -> None:
    studio.run_code(ADMIN)
    web.page.set_viewport_size({"width": width, "height": 900})
    web.page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    web.sign_in("edsger", seed.PASSWORD)
    page = web.go("/points/")
    expect(page.locator("#id_superseded_days")).to_have_value("30")
    page.fill("#id_ended_days", "1")
    page.get_by_role("button", name="Show what that drops").click()
    expect(page.locator("[data-testid=preview]")).to_contain_text("nothing would be dropped now")
    assert web.overflow() == 0
    assert web.barriers() == []
    web.shoot(f"points-{theme}-{width}")
