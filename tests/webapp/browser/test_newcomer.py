"""From `make run` to a first own run with an own reward function: what a newcomer clicks and types, counted and timed.

The studio is the real one of scripts/studio.py, with an empty home. A person's time is estimated by the keystroke-level model
(Card, Moran, Newell 1980): a keystroke 0.28 s, pointing and clicking 1.3 s, a thought before each step 1.35 s; reading a page
is put at 5 s. What the machine takes is measured. docs/newcomer.md has the numbers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.webapp.browser.conftest import ROOT, Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

KEY_S, CLICK_S, THINK_S, READ_S = 0.28, 1.3, 1.35, 5.0
GOAL_S = 300.0
PASSWORD = "a good long password"
CHANGE = ("1.0)", "1.0 + 0.001 * len(text))")
"""What the newcomer changes in the reward that the editor begins with: a little more for longer replies."""


@dataclass
class Person:
    """Somebody at the browser. Counts what hands and eyes do; `stages` are lines of the report."""

    web: Watched
    clicks: int = 0
    characters: int = 0
    pages: int = 0
    machine_s: float = 0.0
    stages: list[dict[str, object]] = field(default_factory=list)

    @property
    def page(self) -> Page:
        return self.web.page

    @property
    def human_s(self) -> float:
        return self.clicks * (CLICK_S + THINK_S) + self.characters * KEY_S + self.pages * READ_S

    def click(self, selector: str) -> None:
        self.page.click(selector)
        self.clicks += 1

    def type(self, selector: str, text: str, *, pasted: bool = False) -> None:
        """Click into a field and type, or paste (two keys)."""
        self.page.fill(selector, text)
        self.clicks += 1
        self.characters += 2 if pasted else len(text)

    def stage(self, name: str, began: float) -> None:
        """A page was reached: note the counts so far, and take its picture at both widths."""
        self.machine_s += time.monotonic() - began
        self.pages += 1
        counts = {
            "clicks": self.clicks,
            "characters": self.characters,
            "pages": self.pages,
            "human_s": round(self.human_s),
        }
        self.stages.append({"stage": name, **counts, "machine_s": round(self.machine_s, 1)})
        for width in (1400, 390):
            self.page.set_viewport_size({"width": width, "height": 900})
            assert self.web.overflow() == 0, name
            self.web.shoot(f"newcomer-{len(self.stages)}-{name.replace(' ', '-')}-{width}")
        self.page.set_viewport_size({"width": 1400, "height": 900})


@dataclass
class Fresh:
    url: str
    password: str
    ready_s: float
    home: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """`make run` on an empty home, without its sample run, which would hold this machine's cores."""
    home = tmp_path_factory.mktemp("fresh")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    models = os.environ.get("OFFBEAT_MODELS", str(ROOT / "var" / "models"))
    environment = os.environ | {
        "OFFBEAT_HOME": str(home), "OFFBEAT_PORT": str(port), "OFFBEAT_MODELS": models, "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    for name in ("DATABASE_URL", "CELERY_BROKER_URL", "OFFBEAT_BIND", "DJANGO_SETTINGS_MODULE"):
        environment.pop(name, None)
    log = home / "studio.out"
    began = time.monotonic()
    with open(log, "wb") as output:
        command = [sys.executable, "scripts/studio.py", "--no-sample"]
        studio = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (found := re.search(r"password: (\S+)", log.read_text())):
                assert studio.poll() is None, log.read_text()
                assert time.monotonic() - began < 240, log.read_text()
                time.sleep(0.3)
            yield Fresh(f"http://127.0.0.1:{port}", found[1], time.monotonic() - began, home, environment)
        finally:
            studio.send_signal(signal.SIGINT)
            try:
                studio.wait(150)
            except subprocess.TimeoutExpired:
                studio.send_signal(signal.SIGINT)
                studio.wait(30)


def test_a_first_own_run_with_an_own_reward_takes_minutes_of_clicking(
    fresh: Fresh, context: BrowserContext, shots: Path
) -> None:
    web = Watched(context.new_page(), Studio(fresh.url, fresh.home, fresh.environment), shots=shots)
    web.page.set_default_timeout(60_000)
    person = Person(web)
    page = person.page

    began = time.monotonic()
    web.go("/")
    person.stage("sign in", began)
    person.type("#id_username", "admin")
    person.type("#id_password", fresh.password, pasted=True)
    began = time.monotonic()
    person.click("[data-testid=sign-in]")
    page.wait_for_url("**/account/password/")
    person.stage("own password", began)
    person.type("#id_old_password", fresh.password, pasted=True)
    person.type("#id_new_password1", PASSWORD)
    person.type("#id_new_password2", PASSWORD)
    began = time.monotonic()
    person.click("[data-testid=save-password]")
    page.wait_for_url("**/runs/")
    person.stage("empty list of runs", began)

    began = time.monotonic()
    person.click("header nav a[href='/rewards/']")
    page.wait_for_url("**/rewards/")
    person.stage("rewards", began)
    began = time.monotonic()
    person.click("[data-testid=new-reward]")
    page.wait_for_selector(".cm-content")
    person.stage("editor", began)
    source = page.evaluate("document.querySelector('textarea[name=source]').value").replace(*CHANGE)
    page.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(source)
    person.clicks += 1
    person.characters += len(CHANGE[1])
    began = time.monotonic()
    person.click("[data-testid=test-reward]")
    expect(page.locator("[data-testid=test-values] tbody tr").first).to_be_visible()
    person.stage("reward tried", began)
    began = time.monotonic()
    person.click("[data-testid=save-reward]")
    expect(page.locator("[data-testid=reward-name]")).to_have_text("my_reward")
    person.stage("reward stored", began)

    began = time.monotonic()
    person.click("[data-testid=use-reward]")
    expect(page.locator("[data-testid=check-result]")).to_contain_text("Ready to launch", timeout=60_000)
    assert page.input_value("[id='id_rewards.0.name']") == "my_reward"
    person.stage("new run", began)
    began = time.monotonic()
    person.click("[data-testid=launch] >> nth=0")
    page.wait_for_url(re.compile(r"/runs/[0-9a-f-]{36}/$"))
    expect(page.locator("[data-testid=state]").first).to_have_text(re.compile("queued|starting|running"))
    person.stage("own run", began)

    spec = page.request.get(page.url + "spec.yaml").text()
    assert "name: my_reward\n  version: 1" in spec
    total = person.human_s + person.machine_s
    report = {"ready_s": round(fresh.ready_s, 1), "human_s": round(person.human_s), "machine_s": round(person.machine_s, 1),
              "total_s": round(total), "stages": person.stages}  # fmt: skip
    print("NEWCOMER " + json.dumps(report))
    (shots / "newcomer.json").write_text(json.dumps(report, indent=1))
    stop = page.locator("[data-testid=stop], [data-testid=stop-now]").first
    stop.click()
    if page.locator("#confirm[open]").count():
        page.click("[data-testid=confirm-yes]")
    assert web.complaints == []
    assert (
        "must consume" not in (fresh.home / "logs" / "web.log").read_text()
    )  # nothing was read into memory to be sent
    assert person.human_s < GOAL_S
    assert person.clicks <= 16
