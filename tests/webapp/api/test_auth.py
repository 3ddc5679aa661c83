"""Who may ask, and how errors look."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from webapp.accounts.models import ApiToken, User
from webapp.runs.models import Run


@pytest.mark.parametrize("path", ["/api/me", "/api/runs", "/api/hosts", "/api/rewards", "/api/spec/schema"])
def test_nothing_without_a_token(db: None, path: str) -> None:
    answer = Client().get(path)
    assert answer.status_code == 401
    assert "API token" in answer.json()["detail"]
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer ", "Basic abc", "wrong"])
def test_a_wrong_token_is_refused(db: None, header: str) -> None:
    assert Client(headers={"Authorization": header}).get("/api/me").status_code == 401


def test_a_token_says_whose_it_is_and_is_marked_used(api: Client, alice: User) -> None:
    assert api.get("/api/me").json() == {
        "username": "alice", "admin": False, "role": "runner+author", "reads_only": False,
    }  # fmt: skip
    assert alice.api_tokens.get().last_used_at is not None


def test_expired_tokens_and_closed_accounts_are_refused(api: Client, alice: User) -> None:
    token = alice.api_tokens.get()
    token.expires_at = timezone.now() - timedelta(seconds=1)
    token.save()
    assert api.get("/api/me").status_code == 401
    ApiToken.objects.update(expires_at=None)
    assert api.get("/api/me").status_code == 200
    User.objects.update(is_active=False)
    assert api.get("/api/me").status_code == 401


def test_a_session_reads_but_writes_only_with_its_csrf_token(alice: User, run: Run) -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(alice)
    assert browser.get("/api/me").json()["username"] == "alice"
    answer = browser.delete(f"/api/runs/{run.pk}")
    assert answer.status_code == 403
    assert "CSRF" in answer.json()["detail"]
    token = "a" * 32
    browser.cookies["csrftoken"] = token
    assert browser.delete(f"/api/runs/{run.pk}", headers={"X-CSRFToken": token}).status_code == 204


def test_health_needs_no_token(db: None) -> None:
    assert Client().get("/api/health").json() == {"status": "ok"}


def test_the_schema_is_public_and_the_docs_are_for_people_logged_in(alice: User) -> None:
    schema = Client().get("/api/openapi.json").json()
    assert "/api/runs/{run_id}/stop" in schema["paths"]
    assert Client().get("/api/docs").status_code == 302
    browser = Client()
    browser.force_login(alice)
    page = browser.get("/api/docs")
    assert page.status_code == 200
    html = page.content.decode()
    assert "cdn" not in html
    assert "<script>" not in html


def test_an_unknown_address_is_404(api: Client) -> None:
    answer = api.get("/api/nothing")
    assert (answer.status_code, answer.json()["detail"]) == (404, "There is no /api/nothing; see /api/docs.")
