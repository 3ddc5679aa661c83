"""Points that come over HTTP: repeated, torn and missing batches; and who may send them."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from django.test import Client

from tests.webapp.conftest import signed_in
from webapp.accounts.models import User
from webapp.metrics import history
from webapp.metrics.history import MAX_BODY
from webapp.runs.models import Run, State


def post(client: Client, url: str, body: Any) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body)
    return client.post(url, data, content_type="application/json")


def lines(first: int, count: int) -> bytes:
    return b"".join(
        orjson.dumps({"v": 1, "kind": "metrics", "t": 1e9 + step, "step": step, "values": {"reward": step / 100}})
        + b"\n"
        for step in range(first, first + count)
    )


@pytest.fixture
def url(as_ada: Client) -> str:
    config = {"learning_rate": 1e-5, "model_name_or_path": "some/model"}
    answer = post(
        as_ada,
        "/api/imports",
        {"name": "from afar", "source": "wandb", "config": config, "started_at": "2026-01-02T03:04:05Z"},
    )
    assert answer.status_code == 201, answer.content
    return f"/api/runs/{answer.json()['id']}"


def test_an_imported_run_is_like_any_other(as_ada: Client, url: str) -> None:
    assert post(as_ada, f"{url}/metrics?offset=0", lines(1, 50)).json()["offset"] == len(lines(1, 50))
    run = as_ada.get(url).json()
    assert (run["state"], run["model"], run["summary"]["reward"]) == ("completed", "some/model", 0.5)
    assert run["started_at"].startswith("2026-01-02T03:04:05")
    events = as_ada.get(f"{url}/events").json()
    assert {"learning_rate": 1e-5, "model_name_or_path": "some/model"} in [
        event["data"].get("config") for event in events
    ]
    chart = as_ada.get(f"{url}/chart", {"metric": "reward"}).json()["series"][0]
    assert chart["step"] == list(range(1, 51))
    assert as_ada.get(f"/runs/{run['id']}/").status_code == 200


def test_repeated_torn_and_missing_batches(as_ada: Client, url: str) -> None:
    first, second = lines(1, 10), lines(11, 10)
    assert post(as_ada, f"{url}/metrics?offset=0", first + second[:-7]).json()["offset"] < len(first + second)
    for _ in range(3):
        assert post(as_ada, f"{url}/metrics?offset=0", first).status_code == 200
    answer = post(as_ada, f"{url}/metrics?offset={len(first + second)}", lines(21, 1))
    assert answer.status_code == 409
    assert "go on from there" in answer.json()["detail"]
    at = post(as_ada, f"{url}/metrics?offset=0", first).json()["offset"]
    assert post(as_ada, f"{url}/metrics?offset={at}", (first + second)[at:]).json()["offset"] == len(first + second)
    chart = as_ada.get(f"{url}/chart", {"metric": "reward"}).json()["series"][0]
    assert (chart["points"], chart["step"]) == (20, list(range(1, 21)))


def test_who_may_send_what(as_ada: Client, grace: User, ada: User, url: str) -> None:
    assert post(signed_in(grace), f"{url}/metrics?offset=0", lines(1, 1)).status_code == 403
    own = Run.objects.create(name="trained here", owner=ada, spec={})
    answer = post(as_ada, f"/api/runs/{own.pk}/metrics?offset=0", lines(1, 1))
    assert answer.status_code == 409
    assert "through its supervisor" in answer.json()["detail"]
    assert post(as_ada, f"{url}/metrics?offset=0", b"x" * (MAX_BODY + 1)).status_code == 422
    assert post(as_ada, f"{url}/metrics?offset=-1", b"").status_code == 422
    assert post(as_ada, "/api/imports", {"name": "a\u0001b", "source": "x"}).status_code == 422


def test_a_run_from_elsewhere_cannot_be_resumed(as_ada: Client, ada: User) -> None:
    run = history.create(
        ada, name="theirs", source="wandb", config={}, tags=[], started_at=None, ended_at=None, failed=True
    )
    page = as_ada.get(f"/runs/{run.pk}/").content.decode()
    assert 'data-testid="resume"' not in page
    assert 'data-testid="clone"' in page
    as_ada.post(f"/runs/{run.pk}/resume/")
    run.refresh_from_db()
    assert run.state == State.FAILED
