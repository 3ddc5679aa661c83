"""Rollouts in a real browser: tokens in colour, search, one rollout, old against new, in both themes and on a phone."""

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
from tests.webapp.rollouts import examples
run = seed.make_run(seed.make_user("rolf"), "products, LoRA r=16, the learning rate of last week", steps=8)
examples.add_conversation(run, 0, "early", row_index=14)
examples.add_conversation(run, 7, "talk", long=9000)
examples.add_tokens(run, 7)
print(json.dumps({"run": str(run.pk), "talk": run.rollouts.get(rollout_id="talk-1").pk,
                  "first": run.rollouts.filter(group_id="7-0").order_by("-reward").first().pk}))
"""


@pytest.fixture(scope="module")
def made(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


def test_every_page_of_rollouts_draws_without_a_complaint(drawn: Drawn, made: dict[str, str]) -> None:
    drawn.sign_in("rolf", seed.PASSWORD)
    base = f"/runs/{made['run']}/rollouts/"
    pages = {
        "rollouts-ratio": f"{base}?colour=ratio", "rollouts-plain": base, "rollouts-found": f"{base}?search=times&min_reward=1",
        "rollouts-nothing": f"{base}?search=absent", "rollout": f"{base}{made['first']}/?colour=entropy",
        "rollout-tools": f"{base}{made['talk']}/", "old-new": f"{base}prompts/?row=14&colour=mask",
        "prompts": f"{base}prompts/",
    }  # fmt: skip
    for name, path in pages.items():
        page = drawn.go(path)
        if "colour" in path:
            expect(page.locator("[data-testid=tokens] .t").first).to_be_visible()
        drawn.look(name)


def test_tokens_are_coloured_by_choice_and_tell_their_values(web: Watched, made: dict[str, str]) -> None:
    web.sign_in("rolf", seed.PASSWORD)
    page = web.go(f"/runs/{made['run']}/rollouts/")
    expect(page.locator("[data-testid=tokens]")).to_have_count(0)
    page.select_option("#colour", "ratio")
    expect(page.locator("[data-testid=tokens]")).to_have_count(18)
    assert page.locator(".token-view .t[class*='up-'], .token-view .t[class*='down-']").count() > 20
    assert "colour=ratio" in page.url
    page.locator(".token-view .t:not(.context)").first.click()
    expect(page.locator("[data-testid=token-facts]")).to_contain_text("ratio")
    expect(page.locator("[data-testid=token-facts]")).to_contain_text("sampler")
    page.select_option("#colour", "mask")
    expect(page.locator(".token-view .t.down-4").first).to_be_visible()
    page.click("a[rel=prev]")  # the choice goes along; that step has no values, and says so
    assert "colour=mask" in page.url
    expect(page.locator(".no-tokens").first).to_be_visible()
    page.select_option("#colour", "")
    expect(page.locator(".no-tokens").first).to_be_hidden()


def test_a_rollout_is_found_and_opened(web: Watched, made: dict[str, str]) -> None:
    web.sign_in("rolf", seed.PASSWORD)
    page = web.go(f"/runs/{made['run']}/rollouts/")
    page.keyboard.press("/")
    page.keyboard.type("Kraków get_weather")
    page.keyboard.press("Enter")
    expect(page.locator("[data-testid=group]")).to_have_count(2)
    expect(page.locator(".rollout.found")).to_have_count(2)
    page.locator(".rollout.found .rollout-link").first.click()
    expect(page.locator("[data-testid=tool-call]")).to_contain_text("get_weather")
    expect(page.locator("[data-testid=facts]")).to_contain_text("judge")
    page.locator(".group-strip a").last.click()
    expect(page.locator(".group-strip a").last).to_have_attribute("aria-current", "page")


def test_old_and_new_are_chosen_by_step(web: Watched, made: dict[str, str]) -> None:
    web.sign_in("rolf", seed.PASSWORD)
    page = web.go(f"/runs/{made['run']}/rollouts/?step=7")
    page.locator("[data-testid=old-new]").first.click()
    expect(page.locator("[data-testid=side] h2").first).to_have_text("Step 0")
    page.select_option("#old", "7")
    expect(page.locator("[data-testid=side] h2").first).to_have_text("Step 7")
