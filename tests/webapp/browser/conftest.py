"""A real Chromium against the real ASGI application, on a database and folders of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request

ROOT = Path(__file__).resolve().parents[3]
START_S = 60.0
AXE = Path(__file__).parent / "vendor" / "axe.min.js"


SHELL = """
import contextlib, io, json, os, sys, traceback
import django
django.setup()
import tests.webapp.seed

def answer(code):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
    except BaseException:
        return False, traceback.format_exc()
    return True, printed.getvalue()

for line in sys.stdin:
    if (child := os.fork()) == 0:
        print(json.dumps(answer(json.loads(line))), flush=True)
        os._exit(0)
    if (status := os.waitpid(child, 0)[1]) != 0:
        print(json.dumps((False, f"ended with status {status}")), flush=True)
"""
"""Runs each line of its input, a piece of Python as JSON, in a fork: starting Django takes longer than most pieces do."""


@dataclass
class Studio:
    """A running web server, and what runs Django code in its home, as a worker would from outside."""

    url: str
    home: Path
    environment: dict[str, str]
    shell: subprocess.Popen[str] | None = None

    def run_code(self, code: str) -> str:
        """Run Python with this studio's settings in a process of its own; returns what it prints.

        Raises AssertionError with its traceback.
        """
        if self.shell is None:
            self.shell = subprocess.Popen(
                [sys.executable, "-c", SHELL], env=self.environment, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(json.dumps(code) + "\n")
        self.shell.stdin.flush()
        done, text = json.loads(self.shell.stdout.readline())
        assert done, text
        return text

    def close(self) -> None:
        if self.shell is not None:
            self.shell.communicate(timeout=20)


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    home = tmp_path_factory.mktemp("home")
    environment = os.environ | {
        "OFFBEAT_HOME": str(home), "DJANGO_SETTINGS_MODULE": "webapp.settings", "PYTHONPATH": str(ROOT),
        "CELERY_BROKER_URL": "memory://", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    for command in (["migrate"], ["collectstatic", "--noinput"]):
        subprocess.run(
            [sys.executable, "manage.py", *command, "--verbosity", "0"],
            env=environment,
            cwd=ROOT,
            check=True,
            timeout=180,
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = home / "web.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--port", str(port), "--log-level", "warning"],
            env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            _wait_for(f"{url}/api/health", server, log)
            studio = Studio(url, home, environment)
            yield studio
            studio.close()
        finally:
            server.terminate()
            server.wait(timeout=20)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if server.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the web server did not answer within {START_S:.0f} s:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


@dataclass
class Watched:
    """A page and everything on it that must not happen: console errors, exceptions, requests to other hosts, 5xx."""

    page: Page
    studio: Studio
    complaints: list[str] = field(default_factory=list)
    shots: Path = Path()
    under_way: set[Request] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(15_000)
        self.page.on("console", lambda message: self._note(message.type == "error", f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self._note(True, f"exception: {error}"))
        self.page.on("request", self._request)
        for ended in ("requestfinished", "requestfailed"):
            self.page.on(ended, lambda request: self.under_way.discard(request))
        self.page.on("response", lambda answer: self._note(answer.status >= 500, f"{answer.status} {answer.url}"))

    def go(self, path: str) -> Page:
        self.under_way.clear()  # what the last page listened to ends with it
        self.page.goto(self.studio.url + path)
        return self.page

    def settle(self) -> None:
        """Wait until all is there that the page asked for, and it has asked for nothing more for a moment.

        Playwright's own "networkidle" looks on for half a second, on each page.
        """
        deadline = time.monotonic() + 15
        quiet = 0
        while quiet < 3:
            self.page.wait_for_timeout(30)  # events arrive meanwhile
            quiet = 0 if self.under_way else quiet + 1
            assert time.monotonic() < deadline, f"still asked for: {[request.url for request in self.under_way]}"

    def shoot(self, name: str) -> None:
        """A picture of the whole page, for people to look at."""
        self.shots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.shots / f"{name}.png", full_page=True)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def barriers(self) -> list[str]:
        """Serious and critical violations that axe-core finds on the page: rule, help, and where."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text())  # not by a script tag, which the page's policy forbids
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        return [
            f"{rule['id']}: {rule['help']}: {[node['html'][:160] for node in rule['nodes'][:4]]}"
            for rule in found if rule["impact"] in ("serious", "critical")
        ]  # fmt: skip

    def sign_in(self, name: str, password: str) -> None:
        self.go("/login/")
        self.page.fill("#id_username", name)
        self.page.fill("#id_password", password)
        self.page.click("[data-testid=sign-in]")
        self.page.wait_for_url("**/runs/")

    def _request(self, request: Request) -> None:
        self.under_way.add(request)
        self._note(not request.url.startswith((self.studio.url, "data:", "blob:")), f"request to {request.url}")

    def _note(self, wrong: bool, text: str) -> None:
        if wrong:
            self.complaints.append(text)


@dataclass
class Drawn(Watched):
    """A page in one colour scheme and window width. axe-core reads what is looked at."""

    width: int = 1400
    found: list[str] = field(default_factory=list)

    def look(self, name: str) -> None:
        """The page as it is now: nothing sticks out, a picture is taken, barriers are noted."""
        assert self.overflow() == 0, name
        self.shoot(name)
        self.found += [f"{name}: {barrier}" for barrier in self.barriers()]


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: SCREENSHOTS, or a temporary folder."""
    return Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("shots"))


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    made = chromium.new_context(viewport={"width": 1400, "height": 900})
    yield made
    made.close()


@pytest.fixture
def web(context: BrowserContext, studio: Studio, shots: Path) -> Iterator[Watched]:
    """A fresh browser window; the test fails when anything on the page complained."""
    watched = Watched(context.new_page(), studio, shots=shots)
    yield watched
    assert watched.complaints == []


@pytest.fixture(params=["light-1400", "dark-1400", "light-390", "dark-390"])
def drawn(request: pytest.FixtureRequest, chromium: Browser, studio: Studio, shots: Path) -> Iterator[Drawn]:
    """Light and dark, desktop and phone; the test fails when a page complained or axe-core found a serious barrier."""
    scheme, width = request.param.split("-")
    context = chromium.new_context(color_scheme=scheme, viewport={"width": int(width), "height": 900})
    page = Drawn(context.new_page(), studio, shots=shots / request.param, width=int(width))
    yield page
    context.close()
    assert page.complaints == []
    assert page.found == []
