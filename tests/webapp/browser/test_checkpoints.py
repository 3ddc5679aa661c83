"""Checkpoints in a real browser: digests, the model card, asking for a merge and a push; in both themes and on a phone."""

from __future__ import annotations

import hashlib
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
from webapp.checkpoints import exports
from webapp.checkpoints.models import Export
run = seed.make_run(seed.make_user("cleo"), "keeps checkpoints", state="completed", steps=40)
newest, oldest = run.checkpoints.all()
merge = exports.request_merge(newest, run.owner)
Export.objects.filter(pk=merge.pk).update(state="done", size_bytes=538_000_000, text="", share=1)
merge.folder.mkdir(parents=True)
(merge.folder / "model.safetensors").write_bytes(b"0" * 1000)
Export.objects.create(checkpoint=newest, kind="push", owner=run.owner, repo="cleo/products-lora", state="failed",
                      text="The hub does not know this token; make one with write access in the hub's settings.")
Export.objects.create(checkpoint=newest, kind="push", owner=run.owner, repo="cleo/products-lora", state="running", share=0.4,
                      text="Uploads 7 files, 4.2 MiB.")
other = seed.make_run(run.owner, "to be merged", state="completed", steps=20)
print(json.dumps({"run": str(run.pk), "other": str(other.pk)}))
"""


@pytest.fixture(scope="module")
def made(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


def test_the_page_draws_without_a_complaint(drawn: Drawn, made: dict[str, str]) -> None:
    drawn.sign_in("cleo", seed.PASSWORD)
    page = drawn.go(f"/runs/{made['run']}/checkpoints/")
    page.locator("summary", has_text="Model card").first.click()
    expect(page.locator("[data-card]").first).to_contain_text("How to load it")
    page.locator("[data-testid=share] summary").first.click()
    assert (
        page.locator(".card-preview img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
    )
    drawn.look("checkpoints-made")


def test_a_digest_is_read_on_demand(web: Watched, made: dict[str, str]) -> None:
    web.sign_in("cleo", seed.PASSWORD)
    page = web.go(f"/runs/{made['run']}/checkpoints/")
    row = page.locator("tr", has_text="adapter_model.safetensors").first
    row.locator("[data-sha]").click()
    expect(row.locator(".digest")).to_have_text(hashlib.sha256(b"\0" * 300_000).hexdigest())


def test_a_merge_is_asked_for_and_followed_until_it_fails(web: Watched, studio: Studio, made: dict[str, str]) -> None:
    web.sign_in("cleo", seed.PASSWORD)
    page = web.go(f"/runs/{made['other']}/checkpoints/")
    page.locator("[data-testid=share] summary").click()
    page.click("[data-testid=merge]")
    export = page.locator("[data-testid=export]")
    expect(export).to_contain_text("Waits for a worker")
    studio.run_code(f"""
from webapp.checkpoints.models import Export
Export.objects.filter(checkpoint__run="{made["other"]}").update(state="running", text="Loads the base model.", share=0.15)
""")
    expect(export).to_contain_text("Loads the base model.")
    studio.run_code(f"""
from webapp.checkpoints.models import Export
Export.objects.filter(checkpoint__run="{made["other"]}").update(state="failed", text="It was too large.")
""")
    expect(page.locator("[data-testid=export-failure]")).to_have_text("It was too large.")


def test_a_push_asks_for_a_name_and_a_token(web: Watched, made: dict[str, str]) -> None:
    web.sign_in("cleo", seed.PASSWORD)
    page = web.go(f"/runs/{made['other']}/checkpoints/")
    page.locator("[data-testid=share] summary").click()
    page.fill("input[name=repo]", "no name")
    page.fill("input[name=token]", "hf_secretsecret")
    page.click("[data-testid=push]")
    expect(page.locator("[data-testid=message]")).to_contain_text("is no name of a model on the hub")
    page.locator("[data-testid=share] summary").click()
    page.fill("input[name=repo]", "cleo/small")
    page.click("[data-testid=push]")  # the token is stored by now
    expect(page.locator("[data-testid=export]").first).to_contain_text("cleo/small")
    assert "hf_secretsecret" not in page.content()
