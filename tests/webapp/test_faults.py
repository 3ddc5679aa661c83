"""docs/faults.md keeps its word, and the faults that no other file tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.db import connection
from django.test import Client

from trainer_core.spec import RunSpec
from webapp.runs.forms import leaves
from webapp.settings import _database

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_is_answered_by_a_test_that_exists_or_a_reason() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 46))
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)", written))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", " ".join(row))
        assert named or "can't occur:" in row[2], row
        assert set(named) <= existing, set(named) - existing


@pytest.mark.django_db
def test_another_host_name_is_refused(client: Client) -> None:
    assert client.get("/login/", headers={"host": "attacker.example"}).status_code == 400
    assert client.get("/login/", headers={"host": "127.0.0.1:8000"}).status_code == 200


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "sqlite", reason="is about SQLite")
def test_sqlite_waits_for_a_busy_database_and_begins_writing_at_once() -> None:
    with connection.cursor() as cursor:
        assert cursor.execute("PRAGMA busy_timeout").fetchone() == (20_000,)
        assert cursor.execute("PRAGMA synchronous").fetchone() == (1,)  # NORMAL
    assert connection.transaction_mode == "IMMEDIATE"
    assert "journal_mode=WAL" in _database(None)["OPTIONS"]["init_command"]


def test_no_setting_asks_for_a_key() -> None:
    """Secrets have no place in a spec, where pages, YAML and command lines would show them."""
    paths = [path for path, _ in leaves(RunSpec)]
    assert len(paths) > 50
    words = {word for path in paths if path != "training.token_budget" for word in re.split(r"[._]", path)}
    assert words.isdisjoint({"key", "token", "secret", "password", "credentials"})
