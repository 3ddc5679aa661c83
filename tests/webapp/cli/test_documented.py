"""The examples of docs/api.md, run as they stand against a live server."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection

from tests.webapp import seed
from webapp.accounts.models import ApiToken
from webapp.cli import main
from webapp.runs.models import Run, State

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators"),
]
DOCS = Path(__file__).resolve().parents[3] / "docs" / "api.md"
ADDRESS, TOKEN = "http://127.0.0.1:8000", "ob_..."


@dataclass
class Block:
    kind: str
    text: str
    line: int


def blocks() -> list[Block]:
    text = DOCS.read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(item[1], item[2], text[: item.start()].count("\n") + 1) for item in found]


def matches(shown: str, printed: str) -> bool:
    """Whether `printed` is what is shown; "..." stands for anything, on a line of its own also for lines."""
    pattern = re.escape("\n" + shown.strip()).replace("\\\n\\.\\.\\.", "(?:\n.*)*?").replace("\\.\\.\\.", ".*?")
    return re.fullmatch(pattern, "\n" + printed.strip()) is not None


@pytest.fixture
def studio(live_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A live server with two runs that ended, somebody who plays the worker, and what address and token are there."""
    monkeypatch.setattr("webapp.runs.lifecycle.notify_queued", lambda: None)  # no broker here
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("OFFBEAT_URL", raising=False)
    monkeypatch.delenv("OFFBEAT_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    ada = seed.make_user("ada")
    for name in ("a run", "a finished run"):
        seed.make_run(ada, name, state=State.COMPLETED, reason="All steps are done.")
    _, token = ApiToken.create(ada, "docs")
    done = threading.Event()
    summary = {"step": 40, "max_steps": 40, "reward": 0.94}

    def work() -> None:
        while not done.wait(0.5):
            waiting = Run.objects.filter(state=State.QUEUED, name="products from a terminal")
            with contextlib.suppress(OperationalError):  # the server's thread is writing; again in a moment
                waiting.update(state=State.COMPLETED, reason="All steps are done.", summary=summary)
        connection.close()

    worker = threading.Thread(target=work)
    worker.start()
    yield {ADDRESS: live_server.url, TOKEN: token}
    done.set()
    worker.join()


def test_every_example_prints_what_the_page_shows(studio: dict[str, str]) -> None:
    found = blocks()
    names: dict[str, Any] = {}
    printed = None
    wrong: list[str] = []
    assert {block.kind for block in found} == {"console", "yaml", "python", "text"}
    for block in found:
        where = f"docs/api.md, line {block.line}"
        if block.kind == "yaml":
            name = re.match(r"# (\S+)\n", block.text)
            assert name is not None, f"{where}: the first line names the file"
            Path(name[1]).write_text(block.text)
        elif block.kind == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(there(block.text, studio), where, "exec"), names)
            printed = output.getvalue()
        elif block.kind == "text":
            assert printed is not None, f"{where}: nothing was run before"
            if not matches(here(block.text, studio), printed):
                wrong.append(f"{where} shows\n{block.text}\nprinted was\n{printed}")
        else:
            wrong += run_commands(block, where, studio)
    assert not wrong, "\n\n".join(wrong)


def run_commands(block: Block, where: str, studio: dict[str, str]) -> list[str]:
    """Run each command of a console block; returns what did not print what is shown."""
    wrong = []
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        words = shlex.split(there(command, studio))
        assert words[0] == "offbeat", f"{where}: {command}"
        output = io.StringIO()
        with contextlib.redirect_stdout(io.TextIOWrapper(raw := io.BytesIO(), write_through=True)):
            with contextlib.redirect_stderr(output):
                main(words[1:])
            printed = raw.getvalue().decode() + output.getvalue()
        if not matches(here(shown, studio), printed):
            wrong.append(f"{where} shows for {command}\n{shown}\nprinted was\n{printed}")
    return wrong


def there(text: str, studio: dict[str, str]) -> str:
    """The example with the address and token of the test's server."""
    return text.replace(ADDRESS, studio[ADDRESS]).replace(TOKEN, studio[TOKEN])


def here(text: str, studio: dict[str, str]) -> str:
    return text.replace(ADDRESS, studio[ADDRESS])


def test_what_differs_is_found() -> None:
    assert matches("a ... c\n", "a b b c\n")
    assert matches("a\n...\nc\n", "a\nb\nb\nc\n")
    assert matches("a\n...\nc\n", "a\nc\n")
    assert not matches("a ... c\n", "a b d\n")
    assert not matches("all of it\n", "all of it\nand more\n")
