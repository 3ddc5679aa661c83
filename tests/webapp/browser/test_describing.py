"""Name, tags and notes are changed where they are shown; owners and tags find runs in the list."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
import json
from tests.webapp import seed
namer, other = seed.make_user("namer"), seed.make_user("other-namer")
spec = seed.seeded_spec()
more = spec.rewards[0].model_copy(update={"name": "soft_overlong"})
spec = spec.model_copy(update={"rewards": [*spec.rewards, more], "tags": ["namer-tag"],
                               "evaluation": spec.evaluation.model_copy(update={"every_steps": 10})})
run = seed.make_run(namer, "named", spec=spec)
run.checkpoints.update(best=True, evaluation={"eval/reward": 0.8125, "eval/pass@1": 0.8125, "eval/pass@k": 0.9})
seed.make_run(other, "named by another", steps=0)
print(json.dumps(str(run.pk)))
"""


@pytest.fixture(scope="module")
def run(studio: Studio) -> str:
    return json.loads(studio.run_code(SEED))


def test_a_name_is_changed_while_the_page_renews_itself(web: Watched, run: str) -> None:
    web.sign_in("namer", seed.PASSWORD)
    page = web.go(f"/runs/{run}/")
    page.locator("[data-testid=describe] summary").click()
    page.fill("#describe-name", "named anew")
    with page.expect_response(lambda answer: "/live/" in answer.url):
        pass  # the head has been asked for again meanwhile
    expect(page.locator("#describe-name")).to_have_value("named anew")
    page.fill("#describe-tags", "one, two")
    page.click("[data-testid=describe-save]")
    expect(page.locator("[data-testid=run-name]")).to_have_text("named anew")
    expect(page.locator(".run-meta .tag")).to_have_text(["one", "two"])
    page.goto(f"{web.studio.url}/runs/?search=named")
    page.check(f"input[value='{run}']")
    page.fill("#bulk-tag", "three")
    page.press("#bulk-tag", "Enter")
    expect(page.locator("[data-testid=message]")).to_have_text("Tagged 1 run.")
    page.select_option("[data-testid=filter-owner]", label="Me")
    page.wait_for_url("**owner=namer**")
    expect(page.locator("[data-testid=run-row] a[title='named by another']")).to_have_count(0)
    expect(page.locator("[data-testid=run-row] .row-tags").first).to_contain_text("three")


def test_what_is_new_on_the_pages_looks_right(drawn: Drawn, run: str) -> None:
    drawn.sign_in("namer", seed.PASSWORD)
    page = drawn.go(f"/runs/{run}/")
    page.wait_for_selector("#chart-reward .js-plotly-plot .main-svg")
    page.locator("#chart-staleness").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-staleness .js-plotly-plot .main-svg")
    drawn.look("run")
    page.locator("[data-testid=describe] summary").click()
    drawn.look("describe")
    page.locator(".chart-toolbar .menu summary").click()
    drawn.look("export")
    drawn.go(f"/runs/{run}/checkpoints/")
    drawn.look("checkpoints-evaluated")
    drawn.go("/runs/?search=named")
    if drawn.width > 1000:  # nothing is chosen on a phone
        page.check(f"input[value='{run}']")
    drawn.look("list")
