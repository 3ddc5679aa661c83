"""The playground in a real browser, against a server that answers as vLLM does; in both themes and on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio, Watched
from tests.webapp.playground.stand_in_server import Server, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]
expect.set_options(timeout=30_000)  # other tests may hold the processor

SEED = """
import json
from tests.webapp import seed
run = seed.make_run(seed.make_user("paula"), "talks", steps=20)
run.current_attempt.servers.create(number=0, port={port}, state="ready")
ended = seed.make_run(run.owner, "talked once", state="completed", steps=2)
print(json.dumps({{"run": str(run.pk), "ended": str(ended.pk)}}))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Server(["run-v3", "run-v12"])) as found:
        found.delay_s = 0.02
        yield found


@pytest.fixture(scope="module")
def made(studio: Studio, server: Server) -> dict[str, str]:
    return json.loads(studio.run_code(SEED.format(port=server.port)))


def test_the_page_draws_without_a_complaint(drawn: Drawn, made: dict[str, str]) -> None:
    drawn.sign_in("paula", seed.PASSWORD)
    drawn.go(f"/runs/{made['ended']}/playground/")
    drawn.shoot("playground-ended")
    page = drawn.go(f"/runs/{made['run']}/playground/")
    page.locator("[data-prompt]").first.click()
    page.click("[data-testid=send]")
    expect(page.locator("[data-testid=side-b] .side-facts")).to_contain_text("tokens/s")
    drawn.look("playground")


def test_two_models_answer_side_by_side_and_remember(web: Watched, server: Server, made: dict[str, str]) -> None:
    web.sign_in("paula", seed.PASSWORD)
    page = web.go(f"/runs/{made['run']}/playground/")
    page.fill("#question", "who are <b>you</b>?")
    page.keyboard.press("Enter")
    newest, base = (page.locator(f"[data-testid=side-{side}] .said.assistant pre") for side in "ab")
    expect(newest).to_have_text("run-v12 heard: who are <b>you</b>?")
    expect(base).to_have_text("policy heard: who are <b>you</b>?")
    expect(page.locator("[data-testid=send]")).to_be_enabled()
    page.fill("#question", "again")
    page.keyboard.press("Enter")
    expect(newest.nth(1)).to_have_text("run-v12 heard: again")
    asked = next(body for body in reversed(server.asked) if body["model"] == "run-v12")
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "user"]
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".said")).to_have_count(0)


def test_what_goes_wrong_is_said_where_the_answer_would_be(web: Watched, server: Server, made: dict[str, str]) -> None:
    web.sign_in("paula", seed.PASSWORD)
    page = web.go(f"/runs/{made['run']}/playground/")
    server.refusal = (400, {"error": {"message": "The prompt is too long"}})
    try:
        page.fill("#question", "hello")
        page.click("[data-testid=send]")
        expect(page.locator(".said.failed pre").first).to_have_text(
            "The server refused (HTTP 400): The prompt is too long."
        )
    finally:
        server.refusal = None
