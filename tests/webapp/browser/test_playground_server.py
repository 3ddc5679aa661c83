"""Starting a server for a run that is over, in a real browser; the worker's part is played by this test."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Drawn, Studio
from tests.webapp.playground.stand_in_server import Server, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]
expect.set_options(timeout=30_000)  # other tests may hold the processor

SEED = """
import os, json
from datetime import timedelta
from django.utils import timezone
from tests.webapp import seed
from webapp.accounts.models import User
from webapp.hosts.models import Host
user = User.objects.filter(username="sofia").first() or seed.make_user("sofia")
run = seed.make_run(user, "is over", state="completed", steps=40)
seed.make_host({host!r})
Host.objects.filter(name={host!r}).update(last_seen_at=timezone.now() + timedelta(hours=1))
print(json.dumps(str(run.pk)))
"""
WORKER = """
from webapp.playground import services
from webapp.runs.models import Run
own = services.newest(Run.objects.get(pk={run!r}))
services.change(own, (own.state,), {state!r}, {reason!r}, log={log!r})
own.ports.all().delete()
if {port}:
    own.ports.create(host=own.host, port={port}, purpose="vLLM server")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Server([])) as found:
        yield found


def work(studio: Studio, run: str, state: str, reason: str, port: int = 0, log: list[str] | None = None) -> None:
    studio.run_code(WORKER.format(run=run, state=state, reason=reason, port=port, log=log or []))


def test_a_server_is_started_talked_to_and_dies(drawn: Drawn, studio: Studio, server: Server) -> None:
    run = json.loads(studio.run_code(SEED.format(host=socket.gethostname())))
    drawn.sign_in("sofia", seed.PASSWORD)
    page = drawn.go(f"/runs/{run}/playground/")
    expect(page.locator("[data-testid=server-takes]")).to_contain_text("which is free")
    drawn.look("playground-offer")
    page.click("[data-testid=start-server]")
    note = page.locator("[data-testid=server-note]")
    expect(note).to_contain_text("Waits for the worker")
    work(studio, run, "starting", "Starts the vLLM server: loading weights.")
    expect(note).to_contain_text("loading weights")
    drawn.look("playground-starting")
    work(studio, run, "running", "Ready.", port=server.port)
    page.fill("#question", "who are you?")  # the page has come by itself
    page.keyboard.press("Enter")
    answers = [page.locator(f"[data-testid=side-{side}] .said.assistant pre") for side in "ab"]
    expect(answers[0]).to_have_text(re.compile(r"^playground-\d+ heard: who are you\?$"))
    expect(answers[1]).to_have_text("policy heard: who are you?")
    drawn.look("playground-own-server")
    work(
        studio,
        run,
        "failed",
        "The vLLM server died again after 3 restarts: killed.",
        log=["loading", "EngineDeadError"],
    )
    expect(page.locator("[data-testid=server-lines]")).to_contain_text("EngineDeadError")
    expect(answers[1]).to_have_text("policy heard: who are you?")  # the conversation stays
    drawn.look("playground-server-died")
