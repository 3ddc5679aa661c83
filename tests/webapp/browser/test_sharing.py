"""Share links and reports, read by somebody without an account."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser, expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
import json
from datetime import timedelta
from tests.webapp import seed
from webapp.reports.models import Report
from webapp.sharing.models import ShareLink
ada = seed.make_user("sharer")
run = seed.make_run(ada, "a run to share", state="completed", steps=24, rollouts=False)
other = seed.make_run(ada, "its rival with a somewhat longer name than one would like", state="running", steps=12,
                      rollouts=False, seed=3)
text = f'''# Does the larger rank help?

We trained **both** on one-digit products; the table says how it ended.

| Run | Rank | Reward |
|---|---:|---:|
| first | 16 | 0.94 |
| second | 32 | 0.91 |

```chart
runs: {run.pk}, {other.pk}
metrics: reward
title: Reward of both
```

## What it costs

- more memory
- `perf/step_s` grows

> Rank 16 is enough here.

```chart
runs: {run.pk}
metrics: entropy, kl
axis: time
```

```chart
runs: nobody
metrics: reward
```

<script>alert("never")</script>
'''
report = Report.objects.create(title="Does the larger rank help? An evening with two runs", owner=ada, text=text)
run_link, run_token = ShareLink.create(run, ada, timedelta(days=7), "for the reviewers")
report_link, report_token = ShareLink.create(report, ada, timedelta(days=7))
print(json.dumps({"run": str(run.pk), "report": str(report.pk), "run_token": run_token, "report_token": report_token}))
"""


@pytest.fixture(scope="module")
def made(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


@pytest.fixture
def sharer(web: Watched, made: dict[str, str]) -> Watched:
    web.sign_in("sharer", seed.PASSWORD)
    return web


def test_every_page_draws_without_a_complaint(drawn: Drawn, made: dict[str, str]) -> None:
    public = {"shared-run": f"/shared/{made['run_token']}/", "shared-report": f"/shared/{made['report_token']}/"}
    private = {
        "reports": "/reports/", "report": f"/reports/{made['report']}/", "report-edit": f"/reports/{made['report']}/edit/",
        "sharing": f"/sharing/runs/{made['run']}/", "sharing-report": f"/sharing/reports/{made['report']}/",
    }  # fmt: skip
    for name, path in {**public, **private}.items():
        if path == "/reports/":
            drawn.sign_in("sharer", seed.PASSWORD)
        page = drawn.go(path)
        if name == "shared-run":
            page.wait_for_selector("#chart-reward .main-svg")
        if name in ("report", "shared-report", "report-edit"):
            expect(page.locator("[data-testid=report-chart] .scatterlayer .trace")).to_have_count(4)
            expect(page.locator("[data-testid=chart-problem]")).to_contain_text("names no run")
        drawn.look(name)


def test_a_run_is_shared_read_by_a_stranger_and_revoked(
    sharer: Watched, made: dict[str, str], chromium: Browser, studio: Studio
) -> None:
    page = sharer.go(f"/runs/{made['run']}/")
    page.locator(".tabs").get_by_text("Sharing").click()
    page.fill("#id_note", "for a stranger")
    page.select_option("#id_days", "1")
    page.click("[data-testid=make-link]")
    address = page.locator("#share-address").inner_text()
    sharer.shoot("sharing-new-link")
    stranger = Watched(chromium.new_context().new_page(), studio)
    theirs = stranger.go(address.removeprefix(studio.url))
    expect(theirs.locator("[data-testid=shared-name]")).to_have_text("a run to share")
    theirs.wait_for_selector("#chart-reward .main-svg")
    expect(theirs.locator("nav[aria-label=Main]")).to_have_count(0)
    expect(theirs.locator("[data-testid=shared-settings]")).to_contain_text("learning_rate")
    theirs.locator("#all-metrics .stage summary").first.click()
    theirs.wait_for_selector("#all-metrics .main-svg")
    assert stranger.complaints == []
    page.goto(page.url)  # a reload would ask for another link
    expect(page.locator("#share-address")).to_have_count(0)
    page.locator("[data-testid=share-link]", has_text="for a stranger").get_by_text("Revoke").click()
    page.click("[data-testid=confirm-yes]")
    expect(page.locator("[data-testid=message]")).to_contain_text("no longer works")
    theirs.reload()
    expect(theirs.locator("[data-testid=link-gone]")).to_contain_text("was revoked")
    stranger.complaints.clear()  # the browser notes the 404
    theirs.context.close()


def test_a_report_is_written_with_a_live_preview(sharer: Watched, made: dict[str, str]) -> None:
    page = sharer.go(f"/runs/{made['run']}/")
    page.click("[data-testid=more]")
    page.click("[data-testid=report-from]")
    expect(page.locator("#report-preview .main-svg .trace").first).to_be_attached()
    page.fill("#id_title", "Written in a browser")
    page.fill("#id_text", f"# Found\n\n```chart\nruns: {made['run']}\nmetrics: reward, kl\ntitle: Two lines\n```\n")
    expect(page.locator("#report-preview h1")).to_have_text("Found")
    expect(page.locator("#report-preview .report-chart h3")).to_have_text("Two lines")
    expect(page.locator("#report-preview .main-svg .scatterlayer .trace")).to_have_count(2)
    page.click("[data-testid=save-report]")
    expect(page.locator("[data-testid=report-title]")).to_have_text("Written in a browser")
    expect(page.locator(".main-svg .scatterlayer .trace")).to_have_count(2)
    page.click("[data-testid=delete-report]")
    page.click("[data-testid=confirm-yes]")
    expect(page.locator("[data-testid=message]")).to_contain_text("Deleted Written in a browser")
