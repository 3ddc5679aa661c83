"""A sweep from the form to the plot, in a real browser."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
import json, random
from tests.webapp import seed
from webapp.runs.models import Run
from webapp.sweeps import services
from webapp.sweeps.services import Plan
from webapp.runs.sweeps import Range
ada = seed.make_user("sweeper")
base = seed.make_run(ada, "products base", state="completed", steps=3, rollouts=False)
plan = Plan({"training.learning_rate": Range(1e-6, 1e-3, log=True, points=4), "lora.r": [8, 16, 32],
             "training.loss_type": ["dapo", "grpo"]}, name="A sweep over rates, ranks and losses with a rather long name")
specs, places, problems = services.combine(base.run_spec(), plan)
assert not problems, problems
sweep = services.create(base, plan, specs, places, ada, launch=True)
for index, trial in enumerate(sweep.trials.all()):
    if index % 5 == 4:
        continue
    attempt = trial.run.attempts.get()
    seed.write_attempt(attempt, 4 + index % 7, trial.run.run_spec(), random.Random(index))
    state = ("completed", "failed", "running")[index % 3]
    Run.objects.filter(pk=trial.run_id).update(state=state)
print(json.dumps({"sweep": str(sweep.pk), "base": str(base.pk)}))
"""


@pytest.fixture(scope="module")
def made(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


@pytest.fixture
def sweeper(web: Watched, made: dict[str, str]) -> Watched:
    web.sign_in("sweeper", seed.PASSWORD)
    return web


def test_every_page_draws_without_a_complaint(drawn: Drawn, made: dict[str, str]) -> None:
    drawn.sign_in("sweeper", seed.PASSWORD)
    for name, path in {"sweeps": "/sweeps/", "sweep-form": f"/sweeps/new/?from={made['base']}",
                       "sweep": f"/sweeps/{made['sweep']}/"}.items():  # fmt: skip
        page = drawn.go(path)
        if name == "sweep":
            expect(page.locator("#parallel .line")).to_have_count(24)
        if name == "sweep-form":
            expect(page.locator("[data-testid=preview-problem]")).to_contain_text("Nothing varies yet")
        drawn.look(name)


def test_a_sweep_is_planned_previewed_launched_and_stopped(sweeper: Watched, made: dict[str, str]) -> None:
    page = sweeper.go(f"/runs/{made['base']}/")
    page.click("[data-testid=more]")
    page.click("[data-testid=sweep-from]")
    page.fill("[id='axis.0.path']", "training.learning_rate")
    page.select_option("[id='axis.0.kind']", "log")
    expect(page.locator("[id='axis.0.values']")).to_be_hidden()
    page.fill("[id='axis.0.low']", "1e-6")
    page.fill("[id='axis.0.high']", "1e-4")
    expect(page.locator("[data-testid=preview-problem]")).to_contain_text("number of points")
    page.fill("[id='axis.0.points']", "3")
    expect(page.locator("[data-testid=sweep-count]")).to_have_text("3 runs")
    page.fill("[id='axis.1.path']", "lora.r")
    page.fill("[id='axis.1.values']", "8, 600")
    expect(page.locator("[data-testid=preview-problem]")).to_contain_text("r=600")
    page.fill("[id='axis.1.values']", "8, 16")
    expect(page.locator("[data-testid=sweep-count]")).to_have_text("6 runs")
    page.click("[data-testid=add-axis]")
    page.fill("[id='axis.2.path']", "training.seed")
    page.fill("[id='axis.2.values']", "1, 2")
    expect(page.locator("[data-testid=sweep-count]")).to_have_text("12 runs")
    page.locator("[data-axis-row='2'] [data-remove-axis]").click()
    expect(page.locator("[data-testid=sweep-count]")).to_have_text("6 runs")
    page.get_by_label("A random choice").check()
    expect(page.locator("[data-testid=preview-problem]")).to_contain_text("how many runs")
    page.fill("#id_count", "4")
    expect(page.locator("[data-testid=sweep-count]")).to_have_text("4 runs")
    sweeper.shoot("sweep-planned")
    page.click("[data-testid=launch-sweep]")
    expect(page.locator("[data-testid=message]")).to_contain_text("4 runs queued")
    expect(page.locator("[data-testid=trial]")).to_have_count(4)
    page.locator("[data-testid=trial] a").first.click()
    expect(page.locator("[data-testid=sweep-link]")).to_be_visible()
    page.click("[data-testid=sweep-link]")
    page.click("[data-testid=stop-sweep]")
    page.click("[data-testid=confirm-yes]")
    expect(page.locator("[data-testid=message]")).to_contain_text("Asked 4 runs to stop")


def test_the_plot_narrows_to_what_is_brushed_and_lifts_out_what_is_pointed_at(
    sweeper: Watched, made: dict[str, str]
) -> None:
    page = sweeper.go(f"/sweeps/{made['sweep']}/")
    expect(page.locator("#parallel .line")).to_have_count(24)
    expect(page.locator("#parallel .axis")).to_have_count(4)
    grip = page.locator("#parallel .grip[data-axis='1']").bounding_box()
    assert grip is not None
    x, top = grip["x"] + grip["width"] / 2, grip["y"]
    page.mouse.move(x, top + 2)
    page.mouse.down()
    page.mouse.move(x, top + 30)
    page.mouse.move(x, top + 60)
    page.mouse.up()
    expect(page.locator("#parallel-hint")).to_contain_text("8 of 24 runs")  # those of the largest rank
    assert page.locator("[data-testid=trial]:visible").count() == 8
    sweeper.shoot("sweep-brushed")
    page.click("#clear-brush")
    expect(page.locator("#parallel .line.out")).to_have_count(0)
    page.locator("[data-testid=trial]").nth(2).hover()
    expect(page.locator("#parallel .line.pointed")).to_have_count(1)
    page.locator("th a", has_text="lora.r").click()
    ranks = page.locator("[data-testid=trial] td:nth-child(4)").all_inner_texts()
    assert ranks == sorted(ranks, key=int)
