"""Roles, secrets and the audit log, in a real browser."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser, expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
import json
from tests.webapp import seed
from webapp.accounts.models import Role, User
from webapp.secrets.services import store
chief = seed.make_user("chief", is_superuser=True)
for name, role in (("looker", Role.VIEWER), ("a-runner-with-quite-a-long-name-for-a-narrow-window", Role.RUNNER)):
    person = seed.make_user(name)
    person.role = role
    person.save()
run = seed.make_run(chief, "the chief's run", state="completed", steps=3, rollouts=False)
store(chief, "HF_TOKEN", "not a real token", shared=True)
store(chief, "WANDB_API_KEY_FOR_THE_EVALUATION_OF_LONG_NAMES_TOKEN", "not a real token")
print(json.dumps({"run": str(run.pk)}))
"""


@pytest.fixture(scope="module")
def made(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


def test_every_page_draws_without_a_complaint(drawn: Drawn, made: dict[str, str]) -> None:
    drawn.sign_in("chief", seed.PASSWORD)
    for name, path in {"people-roles": "/account/people/", "audit": "/audit/", "audit-nothing": "/audit/?search=nothing",
                       "secrets": "/secrets/", "account-tokens": "/account/"}.items():  # fmt: skip
        drawn.go(path)
        drawn.look(name)


def test_a_role_is_changed_and_what_may_be_done_follows(
    web: Watched, made: dict[str, str], chromium: Browser, studio: Studio
) -> None:
    viewer = Watched(chromium.new_context().new_page(), studio, shots=web.shots)
    viewer.sign_in("looker", seed.PASSWORD)
    theirs = viewer.go(f"/runs/{made['run']}/")
    for hidden in ("new-run", "clone", "resume"):
        expect(theirs.locator(f"[data-testid={hidden}]")).to_have_count(0)
    theirs.goto(f"{studio.url}/runs/new/")
    expect(theirs.locator("[data-testid=not-allowed]")).to_contain_text("an admin can make it a runner")
    viewer.shoot("not-allowed")
    viewer.complaints.clear()  # the browser notes the 403

    web.sign_in("chief", seed.PASSWORD)
    page = web.go("/account/people/")
    page.get_by_label("Role of looker").select_option("runner")
    expect(page.locator("[data-testid=message]")).to_contain_text("looker is runner now; before: viewer.")
    theirs.goto(f"{studio.url}/runs/")
    expect(theirs.locator("[data-testid=new-run]")).to_be_visible()
    assert viewer.complaints == []
    theirs.context.close()

    page.goto(f"{studio.url}/audit/?action=person.role_changed")
    expect(page.locator("[data-testid=audit-entry]").first).to_contain_text("looker is runner now")
    with page.expect_download() as waiting:
        page.click("[data-testid=export-csv]")
    assert waiting.value.suggested_filename == "audit.csv"


def test_a_secret_is_stored_and_never_shown_again(web: Watched, made: dict[str, str]) -> None:
    web.sign_in("chief", seed.PASSWORD)
    page = web.go("/secrets/")
    page.fill("#id_name", "lower_case")
    page.fill("#id_value", "a value of some length")
    page.click("[data-testid=store-secret]")
    expect(page.locator("[data-testid=secret-problem]")).to_contain_text("capitals, digits and underscores")
    expect(page.locator("#id_value")).to_have_value("")
    web.complaints.clear()  # the browser notes the 422
    page.fill("#id_name", "OPENAI_API_KEY")
    page.fill("#id_value", "a value of some length")
    page.click("[data-testid=store-secret]")
    expect(page.locator("[data-testid=secret]", has_text="OPENAI_API_KEY")).to_be_visible()
    assert "a value of some length" not in page.content()
    page.locator("[data-testid=secret]", has_text="OPENAI_API_KEY").get_by_text("Delete").click()
    page.click("[data-testid=confirm-yes]")
    expect(page.locator("[data-testid=secret]", has_text="OPENAI_API_KEY")).to_have_count(0)
