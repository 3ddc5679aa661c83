"""Curves of several runs over each other, in a real browser."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser, expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
import json
from tests.webapp import seed
from webapp.runs.sample import sample_spec
user = seed.make_user("comparer")
runs = []
for index, rate in enumerate((1e-4, 1e-4, 3e-4)):
    spec = sample_spec()
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"learning_rate": rate})})
    runs.append(str(seed.make_run(user, f"run {index}", state="completed", steps=20, spec=spec, seed=index).pk))
print(json.dumps(runs))
"""


@pytest.fixture(scope="module")
def compared(studio: Studio) -> list[str]:
    return json.loads(studio.run_code(SEED))


@pytest.fixture
def comparer(web: Watched, compared: list[str]) -> Watched:
    web.sign_in("comparer", seed.PASSWORD)
    return web


NAMES = "document.querySelector('[data-metric=reward] .chart-body').data.filter(t => t.showlegend !== false).map(t => t.name)"


def test_runs_chosen_in_the_list_are_drawn_over_each_other_and_the_address_keeps_the_view(
    comparer: Watched, compared: list[str], chromium: Browser
) -> None:
    page = comparer.go("/runs/?search=run+")
    for run in compared:
        page.check(f"input[value='{run}']")
    page.click("[data-testid=compare]")
    page.wait_for_selector("[data-metric=reward] .main-svg")
    assert sorted(page.evaluate(NAMES)) == ["run 0", "run 1", "run 2"]
    page.select_option("[aria-label='Horizontal axis']", "time")
    page.get_by_label("Log scale").check()
    expect(page.locator("[data-testid=config-diff] tr.differs")).to_have_count(2)
    assert "axis=time" in page.url
    assert "log=1" in page.url
    comparer.page.goto(page.url)
    page.wait_for_selector("[data-metric=reward] .main-svg")
    assert page.evaluate("document.querySelector('[data-metric=reward] .chart-body').layout.yaxis.type") == "log"
    first = page.evaluate("document.querySelector('[data-metric=reward] .chart-body').data[0].x[0]")
    assert 0 <= first < 2  # minutes since the start of the run, not a date


def test_grouped_runs_are_a_mean_with_a_band(comparer: Watched, compared: list[str]) -> None:
    query = "&".join(f"run={run}" for run in compared)
    page = comparer.go(f"/runs/compare/?{query}&group=training.learning_rate&metric=reward")
    page.wait_for_selector("[data-metric=reward] .main-svg")
    page.wait_for_function(f"() => {NAMES}.length === 2")
    assert page.evaluate(NAMES) == ["training.learning_rate = 0.0001", "training.learning_rate = 0.0003"]
    drawn = page.evaluate("document.querySelector('[data-metric=reward] .chart-body').data.map(t => Array.from(t.y))")
    values = []
    for run in compared[:2]:
        chart = page.evaluate(f"fetch('/api/runs/{run}/chart?metric=reward').then(r => r.json())")
        values.append(chart["series"][0]["y"])
    low, high, mean = drawn[0], drawn[1], drawn[2]
    for index, pair in enumerate(zip(*values, strict=True)):
        assert low[index] == pytest.approx(min(pair))
        assert high[index] == pytest.approx(max(pair))
        assert mean[index] == pytest.approx(sum(pair) / 2)
    comparer.shoot("compare-grouped")
    chart = page.locator("[data-metric=reward]")
    with page.expect_download() as picture:
        chart.get_by_role("button", name="PNG").click()
    assert picture.value.path().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with page.expect_download() as points:
        chart.get_by_role("link", name="CSV").click()
    assert len(points.value.path().read_text().splitlines()) == 1 + 3 * 20
