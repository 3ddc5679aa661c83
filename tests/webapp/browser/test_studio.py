"""What a person does with the pages, in a real browser, before any worker is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.urls import resolve
from playwright.sync_api import Browser, expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Studio, Watched
from tests.webapp.browser.walking import pages_at

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = '''
import json
from datetime import timedelta
from tests.webapp import seed
from webapp.accounts.models import User
from webapp.rewards import services
from webapp.reports.models import Report
from webapp.rewards.forms import STARTER
from webapp.sharing.models import ShareLink
from webapp.sweeps.models import Sweep, Trial
ada = seed.make_user("ada", is_superuser=True)
grace = seed.make_user("grace-whose-name-is-rather-long")
long_name = "a name that somebody typed without thinking of tables " + "x" * 60
runs = {
    "running": seed.make_run(ada, lease=True),
    "failed": seed.make_run(ada, "too large a batch", state="failed", steps=7, reason="The GPU ran out of memory: lower "
                            "training.token_budget, turn gradient checkpointing on, or train with LoRA."),
    "completed": seed.make_run(grace, long_name, state="completed", steps=40, reason="All steps are done."),
    "queued": seed.make_run(ada, "waits", state="queued", steps=0, reason="Waits for a device: workbench has 1."),
    "starting": seed.make_run(ada, "warming up", state="starting", steps=0, reason="The vLLM server loads the model (12 s)."),
    "draft": seed.make_run(ada, "an idea", state="draft"),
}
function = services.create_function(STARTER.replace("my_reward", "seeded_reward"), "Last number, with a crumb", ada)
services.add_version(function, function.latest.source.replace("0.1", "0.2"), "a bigger crumb", ada)
checkpoint = runs["completed"].checkpoints.first().pk
report = Report.objects.create(title="What was learned", owner=ada, text=f"""# Learned

Much.

```chart
run: {runs["completed"].pk}
metric: reward
```
""")
sweep = Sweep.objects.create(name="rates", owner=ada, base=runs["completed"], method="grid",
                             axes={"training.learning_rate": [1e-4, 3e-4]})
for number, (state, rate) in enumerate((("completed", 1e-4), ("failed", 3e-4)), 1):
    Trial.objects.create(sweep=sweep, run=runs[state], number=number, place={"training.learning_rate": rate})
_, token = ShareLink.create(runs["completed"], ada, timedelta(days=2))
values = {
    "run_id": runs["completed"].pk, "runs:edit run_id": runs["draft"].pk, "checkpoint_id": checkpoint, "name": "seeded_reward",
    "rollout_id": runs["completed"].rollouts.first().pk, "report_id": report.pk, "sweep_id": sweep.pk, "token": token,
    "user_id": grace.pk, "token_id": 1, "link_id": 1, "secret_id": 1, "host_id": 1, "hook_id": 1, "export_id": 1, "number": 2,
}
ids = {state: str(run.pk) for state, run in runs.items()}
print(json.dumps(ids | {"checkpoint": checkpoint, "values": values}, default=str))
'''


@pytest.fixture(scope="module")
def runs(studio: Studio) -> dict[str, Any]:
    """Ids of seeded runs by state; `values` are those of the parameters of addresses."""
    return json.loads(studio.run_code(SEED))


@pytest.fixture
def ada(web: Watched, runs: dict[str, str]) -> Watched:
    web.sign_in("ada", seed.PASSWORD)
    return web


LIVE = ("run", "logs", "runs", "shared:show")
"""Pages that go on asking, and so never settle."""


def pages(runs: dict[str, Any]) -> dict[str, str]:
    live = f"/runs/{runs['running']}/"
    return {
        "runs": "/runs/", "runs-nothing-found": "/runs/?search=nothing+has+this", "new-run": "/runs/new/?preset=sample",
        "clone": f"/runs/new/?from={runs['completed']}", "run": live, "rollouts": f"{live}rollouts/?step=6",
        "checkpoints": f"/runs/{runs['completed']}/checkpoints/", "no-checkpoints": f"/runs/{runs['starting']}/checkpoints/",
        "logs": f"{live}logs/", "events": f"{live}events/", "settings": f"{live}settings/",
        "failed": f"/runs/{runs['failed']}/", "completed": f"/runs/{runs['completed']}/", "queued": f"/runs/{runs['queued']}/",
        "starting": f"/runs/{runs['starting']}/", "draft": f"/runs/{runs['draft']}/", "rewards": "/rewards/",
        "reward": "/rewards/seeded_reward/", "write-reward": "/rewards/new/", "hosts": "/hosts/",
        "compare": f"/runs/compare/?run={runs['running']}&run={runs['completed']}&run={runs['failed']}",
        "compare-long-name-offered": f"/runs/compare/?run={runs['running']}", "account": "/account/",
        "password": "/account/password/", "people": "/account/people/",
        "webhooks": "/webhooks/", "fork": f"/runs/new/?from={runs['completed']}&checkpoint={runs['checkpoint']}",
    }  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme, width", [("light", 1400), ("dark", 1400), ("light", 390), ("dark", 390)])
def test_every_page_draws_without_a_complaint(
    chromium: Browser, studio: Studio, runs: dict[str, Any], shots: Path, scheme: str, width: int
) -> None:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    web = Watched(context.new_page(), studio, shots=shots / f"{scheme}-{width}")
    barriers: list[str] = []
    web.go("/login/")
    web.shoot("login")
    web.sign_in("ada", seed.PASSWORD)
    listed = pages(runs)
    known = {resolve(path.partition("?")[0]).view_name for path in listed.values()}
    if "found" not in runs:  # the same in each scheme and width
        runs["found"] = pages_at(web.page, studio.url, runs["values"])
    found = {name: path for name, path in runs["found"].items() if name not in known}
    for name, path in (listed | found).items():
        page = web.go(path)
        if name not in LIVE:
            web.settle()
        if name in ("run", "failed", "completed"):
            page.locator("#chart-reward").scroll_into_view_if_needed()  # charts are drawn when they come into view
            page.wait_for_selector("#chart-reward .main-svg")
        if name.startswith("compare"):
            page.wait_for_selector("#compare .main-svg")
        if "rewards/new" in path:
            page.wait_for_selector(".cm-editor")
        if path.startswith("/runs/new"):
            expect(page.locator("#check-facts li").first).to_be_visible()
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert web.overflow() == 0, name
        web.shoot(name)
        if (scheme, width) != (
            "dark",
            390,
        ):  # its colours are those of the dark wide page, the rest that of the light phone's
            barriers += [f"{name}: {barrier}" for barrier in web.barriers()]
    context.close()
    assert web.complaints == []
    assert not barriers, "\n".join(barriers)


def test_question_mark_shows_the_keys_and_escape_closes_them(ada: Watched) -> None:
    page = ada.go("/runs/")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    expect(page.locator("#keys")).to_contain_text("search")
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("/")
    page.keyboard.type("why?")
    expect(page.locator("input[type=search]")).to_have_value("why?")
    expect(page.locator("#keys")).to_be_hidden()


def test_a_run_is_launched_and_stopped_by_keyboard_alone(ada: Watched, runs: dict[str, str]) -> None:
    page = ada.go(f"/runs/{runs['draft']}/")

    def tab_to(selector: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(f"document.activeElement.matches({selector!r})"):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline != "none", "the focus must be seen"
                return
        raise AssertionError(f"Tab never reached {selector}")

    tab_to("[data-testid=launch]")
    page.keyboard.press("Enter")
    expect(page.locator("[data-testid=state]").first).to_have_text("queued")
    tab_to("[data-testid=stop]")
    page.keyboard.press("Enter")
    expect(page.locator("[data-testid=state]").first).to_have_text("stopped")


def test_no_page_allows_inline_script_and_one_that_got_in_does_not_run(ada: Watched) -> None:
    page = ada.page
    answer = page.goto(ada.studio.url + "/runs/")
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "default-src 'self';" in policy
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s) }"
    )
    assert page.evaluate("window.ran") is None
    ada.complaints.clear()  # the browser has said that it refused


def test_signing_in_wrongly_says_so(web: Watched, runs: dict[str, str]) -> None:
    page = web.go("/hosts/")
    page.fill("#id_username", "ada")
    page.fill("#id_password", "wrong")
    page.click("[data-testid=sign-in]")
    expect(page.locator("[data-testid=login-problem]")).to_contain_text("do not match")
    page.fill("#id_password", seed.PASSWORD)
    page.click("[data-testid=sign-in]")
    page.wait_for_url("**/hosts/")


def test_a_reward_is_written_tried_stored_and_changed(ada: Watched) -> None:
    page = ada.go("/rewards/new/")
    editor = page.locator(".cm-content")
    editor.click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("def shorter(completions, **columns):\n    return [\n")
    expect(page.locator("[data-testid=source-problems]")).to_contain_text("Line 2")
    expect(page.locator(".cm-lintRange-error, .cm-lint-marker-error").first).to_be_attached()
    ada.shoot("reward-with-problem")

    page.keyboard.press("Control+a")
    page.keyboard.insert_text(
        "def shorter(completions, **columns):\n    return [1 / len(c[-1]['content']) for c in completions]\n"
    )
    expect(page.locator("[data-testid=source-problems]")).to_be_empty()
    page.click("[data-testid=test-reward]")
    values = page.locator("[data-testid=test-values] tbody tr")
    expect(values).to_have_count(3)
    expect(page.locator("[data-testid=isolation]")).to_contain_text("Isolation in force")
    ada.shoot("reward-tested")

    page.get_by_label("Rollouts of a run").check()
    page.select_option("#test_run", index=1)
    page.click("[data-testid=test-reward]")
    expect(page.locator("[data-testid=test-result]")).to_contain_text("In the run")

    page.fill("#id_description", "Shorter is better")
    page.click("[data-testid=save-reward]")
    expect(page.locator("[data-testid=reward-name]")).to_have_text("shorter")

    page.click("[data-testid=edit-reward]")
    page.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("def shorter(completions, **columns):\n    return [1 / 0 for c in completions]\n")
    page.click("[data-testid=test-reward]")
    error = page.locator("[data-testid=test-error]")
    expect(error).to_contain_text("Line 2: ZeroDivisionError")
    ada.shoot("reward-error")
    page.fill("#id_note", "divides by zero")
    page.click("[data-testid=save-reward]")
    expect(page.locator("[data-testid=version-diff] .del")).to_have_count(1)


def test_a_run_is_set_up_checked_and_queued(ada: Watched) -> None:
    page = ada.go("/runs/new/?preset=sample")
    problems = page.locator("[data-testid=check-problems] li")
    expect(page.locator("[data-testid=check-result]")).to_contain_text("Ready to launch")
    page.fill("[id='id_training.max_steps']", "many")
    expect(page.locator("[data-error-for='training.max_steps']")).to_contain_text("a whole number is needed")
    expect(problems).to_have_count(1)
    ada.shoot("form-with-problem")
    page.fill("[id='id_training.max_steps']", "12")
    page.fill("[id='id_data.source']", "somebody/dataset")
    options = page.locator("[data-error-for='data.options']")  # of a field that other datasets do not have
    expect(options).to_contain_text("leave them empty")
    expect(options).to_be_visible()
    page.fill("[id='id_data.source']", "reasoning_gym:products")
    expect(page.locator("[data-testid=check-result]")).to_contain_text("Ready to launch")
    expect(page.locator("[data-testid=prompts] pre")).to_have_count(3)

    page.fill("[id='id_data.source']", "reasoning_gym:product")
    expect(page.locator("[data-error-for='data.source']")).to_contain_text("products")
    page.fill("[id='id_data.source']", "reasoning_gym:products")

    rank = page.locator("[data-path='lora.r']")
    expect(rank).to_be_visible()
    page.uncheck("[id='id_lora.enabled']")
    expect(rank).to_be_hidden()
    page.check("[id='id_lora.enabled']")

    page.click("[data-testid=add-reward]")
    page.select_option("[id='id_rewards.1.name']", "seeded_reward")
    expect(page.locator("[data-reward-row='1'] .version")).to_be_visible()
    page.fill("[id='id_rewards.1.weight']", "0.5")
    page.fill("#id_name", "from the browser")
    expect(page.locator("[data-testid=check-result]")).to_contain_text("Ready to launch")
    page.click("[data-testid=save-draft]")
    expect(page.locator("[data-testid=run-name]")).to_have_text("from the browser")
    expect(page.locator("[data-testid=state]").first).to_have_text("draft")
    page.locator(".tabs").get_by_text("Settings").click()
    expect(page.locator("[data-testid=spec-yaml]")).to_contain_text("name: seeded_reward\n  version: 2\n  weight: 0.5")

    page.click("[data-testid=launch]")
    expect(page.locator("[data-testid=state]").first).to_have_text("queued")
    expect(page.locator("[data-testid=reason]")).to_contain_text("Waits for a worker")
    page.click("[data-testid=stop]")
    expect(page.locator("[data-testid=state]").first).to_have_text("stopped")


def test_a_clone_shows_what_changed(ada: Watched, runs: dict[str, str]) -> None:
    page = ada.go(f"/runs/{runs['running']}/")
    page.click("[data-testid=clone]")
    page.fill("[id='id_training.learning_rate']", "0.001")
    expect(page.locator("[data-testid=diff] code", has_text="training.learning_rate")).to_be_visible()
    ada.shoot("clone-diff")
    page.click("[data-testid=save-draft]")
    page.locator(".tabs").get_by_text("Settings").click()
    expect(page.locator("[data-testid=diff]")).to_contain_text("training.learning_rate")


def test_a_run_page_follows_the_run_without_a_reload(ada: Watched, studio: Studio, runs: dict[str, str]) -> None:
    page = ada.go(f"/runs/{runs['running']}/")
    expect(page.locator("[data-testid=step]")).to_have_text("24")
    page.click("[data-testid=more]")
    studio.run_code(f"""
import random
from tests.webapp import seed
from webapp.runs.models import Run
run = Run.objects.get(pk="{runs["running"]}")
seed.write_attempt(run.current_attempt, 4, run.run_spec(), random.Random(1), first=25)
""")
    expect(page.locator("[data-testid=step]")).to_have_text("28")
    expect(page.locator("[data-testid=download-yaml]")).to_be_visible()  # the menu that was open stays open
    last = "Math.max(...document.querySelector('#chart-reward .js-plotly-plot, #chart-reward .chart-body').data[0].x)"
    page.wait_for_function(f"() => {last} >= 28")


def test_the_log_is_followed_filtered_and_clean(ada: Watched, studio: Studio, runs: dict[str, str]) -> None:
    page = ada.go(f"/runs/{runs['running']}/logs/?file=server-0.log")
    log = page.locator("[data-testid=log]")
    expect(log).to_contain_text("INFO server up")
    expect(log).to_contain_text("Loading weights: 100%")
    expect(log).not_to_contain_text("Loading weights:  10%")
    path = studio.home / "runs" / runs["running"] / "attempts" / "1" / "server-0.log"
    with open(path, "a") as file:
        file.write("ERROR something went wrong\n")
    expect(log).to_contain_text("something went wrong")
    page.keyboard.press("/")
    page.keyboard.type("wrong")
    expect(log.get_by_text("INFO server up")).to_be_hidden()
    expect(log.get_by_text("something went wrong")).to_be_visible()


def test_stopping_asks_first_and_goes_back_on_cancel(ada: Watched, runs: dict[str, str]) -> None:
    page = ada.go(f"/runs/{runs['running']}/")
    page.click("[data-testid=stop-now]")
    ada.shoot("confirm")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("[data-testid=stop-now]")).to_be_enabled()
    page.click("[data-testid=stop-now]")
    page.click("[data-testid=confirm-yes]")
    expect(page.locator("[data-testid=stop-now]")).to_be_disabled()


def test_an_adapter_is_downloaded(ada: Watched, runs: dict[str, str], tmp_path: Path) -> None:
    page = ada.go(f"/runs/{runs['completed']}/checkpoints/")
    with page.expect_download() as waiting:
        page.locator("[data-testid=download-adapter]").first.click()
    waiting.value.save_as(tmp_path / "adapter.zip")
    import zipfile

    names = zipfile.ZipFile(tmp_path / "adapter.zip").namelist()
    assert any(name.endswith("adapter_model.safetensors") for name in names)
    assert not any("optimizer" in name for name in names)


def test_the_theme_is_chosen_and_kept(ada: Watched) -> None:
    page = ada.go("/runs/")
    theme = "document.documentElement.dataset.theme"
    before = page.evaluate(theme)
    page.locator("header [data-theme-toggle]").click()
    after = page.evaluate(theme)
    assert {before, after} == {"light", "dark"}
    page.reload()
    assert page.evaluate(theme) == after


def test_the_first_password_is_changed_before_anything_else(web: Watched, studio: Studio) -> None:
    studio.run_code("""
from webapp.accounts.models import User
User.objects.create_user("fresh", password="printed in a terminal", must_change_password=True)
""")
    page = web.go("/login/")
    page.fill("#id_username", "fresh")
    page.fill("#id_password", "printed in a terminal")
    page.click("[data-testid=sign-in]")
    page.wait_for_url("**/account/password/")
    web.shoot("first-password")
    page.fill("#id_old_password", "printed in a terminal")
    page.fill("#id_new_password1", "known to nobody else")
    page.fill("#id_new_password2", "known to nobody else")
    page.click("[data-testid=save-password]")
    page.wait_for_url("**/runs/")
