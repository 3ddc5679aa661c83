"""The reward lab in a real browser: a test on stored rollouts with its histogram, and versions against each other."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]
expect.set_options(timeout=30_000)  # other tests may hold the processor

SEED = """
import json
from tests.webapp import seed
from webapp.rewards import services
run = seed.make_run(seed.make_user("rita"), "gave rewards", steps=8)
source = "def lab_reward(completions, **columns):\\n    return [{} for completion in completions]\\n"
function = services.create_function(source.format("len(completion[-1]['content']) / 40"), "Length in parts", run.owner)
for number, value in ((2, "1.0"), (3, "len(completion[-1]['content']) / 80")):
    services.add_version(function, source.format(value), f"change {number}", run.owner)
print(json.dumps({"run": str(run.pk)}))
"""


@pytest.fixture(scope="module")
def made(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


def test_a_trial_on_stored_rollouts_draws_its_histogram(drawn: Drawn, made: dict[str, str]) -> None:
    drawn.sign_in("rita", seed.PASSWORD)
    page = drawn.go("/rewards/lab_reward/")
    page.get_by_label("Rollouts of a run").check()
    page.select_option("#test_run", made["run"])
    page.fill("#test_groups", "12")
    page.click("[data-testid=test-reward]")
    expect(page.locator("[data-testid=histogram] .bin").first).to_be_visible(timeout=30_000)
    expect(page.locator("[data-testid=comparison]")).to_contain_text("of 96")
    expect(page.locator("[data-testid=test-values]")).to_have_count(12)
    assert page.locator("rect.old").count() == page.locator("rect.new").count() > 1
    drawn.look("reward-lab")


def test_any_two_versions_stand_against_each_other(web: Watched, made: dict[str, str]) -> None:
    web.sign_in("rita", seed.PASSWORD)
    page = web.go("/rewards/lab_reward/")
    expect(page.locator("[data-testid=version-diff] h2")).to_have_text("Changes since version 2")
    page.get_by_role("link", name="with version 3: version 1").click()
    expect(page.locator("[data-testid=version-diff] h2")).to_have_text("Changes since version 1")
    expect(page.locator("[data-testid=version-diff] .add")).to_contain_text("/ 80")
