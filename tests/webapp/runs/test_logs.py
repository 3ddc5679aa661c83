"""Logs are read in pieces that fit together again, cleaned of what terminals need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.runs import logs
from webapp.runs.models import Attempt, Run


def test_clean_keeps_the_last_state_of_a_rewritten_line() -> None:
    assert logs.clean("10%\r50%\r100%\ndone\r\n") == "100%\ndone\n"


def test_clean_drops_colours_titles_and_control_characters() -> None:
    assert logs.clean("\x1b[1;32mok\x1b[0m \x1b]0;title\x07x\x1b[2Ky\x00z\ta") == "ok xyz\ta"


LINES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=30), max_size=40
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lines=LINES, piece=st.integers(32, 200))
def test_pieces_make_up_the_whole_log(tmp_path: Path, monkeypatch: Any, lines: list[str], piece: int) -> None:
    monkeypatch.setattr(logs, "PIECE", max(piece, max((len(line.encode()) for line in lines), default=0) + 1))
    path = tmp_path / "trainer.log"
    whole = "".join(f"{line}\n" for line in lines)
    path.write_text(whole, encoding="utf-8")

    end = logs.read_end(path)
    text, start = end.text, end.start
    while start > 0:
        before = logs.read_before(path, start)
        assert before.end == start
        assert before.start < start
        text, start = before.text + text, before.start
    assert text == whole

    text, at = "", 0
    for _ in range(len(whole.encode()) + 2):
        after = logs.read_after(path, at)
        assert after.start == at
        text, at = text + after.text, after.end
        if at == after.size:
            break
    assert text == whole


def test_a_line_still_being_written_is_shown_apart(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_bytes(b"one\nload 10%\rload 20%")
    piece = logs.read_end(path)
    assert (piece.text, piece.partial, piece.end) == ("one\n", "load 20%", 4)
    path.write_bytes(b"one\nload 10%\rload 20%\rload 30%\n")
    assert logs.read_after(path, piece.end).text == "load 30%\n"


def test_a_log_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("new\n")
    piece = logs.read_after(path, 1000)
    assert (piece.start, piece.text) == (0, "new\n")


def test_a_line_longer_than_a_piece_comes_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(logs, "PIECE", 10)
    path = tmp_path / "trainer.log"
    path.write_text("x" * 25 + "\n")
    ends = [0]
    while ends[-1] < 26:
        ends.append(logs.read_after(path, ends[-1]).end)
    assert ends == [0, 10, 20, 26]


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, steps=3)


def attempt_of(run: Run) -> Attempt:
    attempt = run.current_attempt
    assert attempt is not None
    return attempt


@pytest.mark.django_db
def test_only_logs_inside_the_folder_are_listed(run: Run, tmp_path: Path) -> None:
    attempt = attempt_of(run)
    (tmp_path / "outside.log").write_text("secret")
    (attempt.folder / "link.log").symlink_to(tmp_path / "outside.log")
    (attempt.folder / "notes.txt").write_text("")
    assert [path.name for path in logs.log_files(attempt)] == ["trainer.log", "server-0.log"]
    for number in (10, 9):
        (attempt.folder / f"server-{number}.log").touch()
    assert [path.name for path in logs.log_files(attempt)][1:] == ["server-0.log", "server-9.log", "server-10.log"]


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["../../spec.yaml", "/etc/passwd", "spool.jsonl", "link.log", "nothing.log"])
def test_a_name_that_is_not_listed_is_no_log(as_ada: Client, run: Run, name: str) -> None:
    for page in ("data", "file"):
        assert as_ada.get(f"/runs/{run.pk}/logs/{page}/", {"file": name}).status_code == 404


@pytest.mark.django_db
def test_the_page_tails_by_bytes(as_ada: Client, run: Run) -> None:
    url = f"/runs/{run.pk}/logs/data/"
    first = as_ada.get(url, {"file": "trainer.log"}).json()
    assert first["text"].count("\n") == 3
    with open(attempt_of(run).folder / "trainer.log", "a") as file:
        file.write("\x1b[31mmore\x1b[0m\n")
    after = as_ada.get(url, {"file": "trainer.log", "after": first["end"]}).json()
    assert (after["text"], after["live"]) == ("more\n", True)
    assert as_ada.get(url, {"attempt": 7}).status_code == 404


@pytest.mark.django_db
def test_a_log_is_downloaded_whole(as_ada: Client, run: Run) -> None:
    response = as_ada.get(f"/runs/{run.pk}/logs/file/", {"file": "server-0.log"})
    assert response.headers["Content-Disposition"].startswith("attachment")
    assert int(response.headers["Content-Length"]) == (attempt_of(run).folder / "server-0.log").stat().st_size


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.sampled_from(["", "x", "Loss 1", "a loss", "\x1b[1mlo\x1b[0mss", "loss\rgone", "Ünder löss", "loss"])),
    words=st.sampled_from(["loss", "LOSS", "ü", "x", "ss"]), scan=st.integers(16, 60), most=st.integers(1, 5),
)  # fmt: skip
def test_a_search_finds_the_lines_that_are_shown(
    tmp_path: Path, monkeypatch: Any, lines: list[str], words: str, scan: int, most: int
) -> None:
    """In pieces of any size, the same lines as a look at the whole text finds, each at its place."""
    monkeypatch.setattr(logs, "SCAN", scan)
    monkeypatch.setattr(logs, "MOST_HITS", most)
    path = tmp_path / "trainer.log"
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    found: list[tuple[int, str]] = []
    at: int | None = 0
    while at is not None:
        hits = logs.search(path, words, at)
        assert hits.next is None or hits.next > at
        found, at = [*found, *hits.lines], hits.next
    shown = [(text, logs.clean(text)) for text in lines]
    assert [text for _, text in found] == [text for _, text in shown if words.casefold() in text.casefold()]
    raw = path.read_bytes()
    assert all(logs.clean(raw[start:].split(b"\n")[0].decode()) == text for start, text in found)


BIG = 100 * 2**20


@pytest.mark.slow
def test_a_large_log_is_read_and_searched_in_constant_memory(tmp_path: Path) -> None:
    """100 MiB: its end, a piece before it and a search through all of it hold a few pieces in memory, never the file."""
    import tracemalloc

    path = tmp_path / "trainer.log"
    line = b"2026-11-30 12:00:00 INFO step 17: everything goes on as it did before, nothing to be seen in this line\n"
    with open(path, "wb") as file:
        for index in range(100):
            file.write(line * (2**20 // len(line)))
            file.write(b"%0*d\n" % (2**20 % len(line) - 1 or len(line) - 1, index))
        file.write(b"ERROR: the needle\n")
    assert path.stat().st_size >= BIG
    tracemalloc.start()
    end = logs.read_end(path)
    assert end.text.endswith("ERROR: the needle\n")
    assert len(end.text) <= logs.PIECE + 1000
    assert logs.read_before(path, end.start).end == end.start
    found, at, pieces = [], 0, 0
    while at is not None:
        hits = logs.search(path, "NEEDLE", at)
        found, at, pieces = [*found, *hits.lines], hits.next, pieces + 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [text for _, text in found] == ["ERROR: the needle"]
    assert pieces <= BIG // logs.SCAN + 2
    assert peak < 5 * logs.SCAN
