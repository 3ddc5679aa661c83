"""Signing in, the first account's password, tokens."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.cache import cache
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from webapp.accounts import attempts
from webapp.accounts.models import ApiToken, FailedSignIn, User

pytestmark = pytest.mark.django_db


def sign_in(client: Client, name: str, password: str, **extra: str) -> Any:
    return client.post("/login/", {"username": name, "password": password, **extra})


@pytest.mark.parametrize("path", ["/runs/", "/runs/new/", "/rewards/", "/hosts/", "/account/", "/account/password/"])
def test_pages_send_strangers_to_the_login_page(path: str) -> None:
    response = Client().get(path)
    assert response.status_code == 302
    assert response.headers["Location"] == f"/login/?next={path}"


def test_signing_in_leads_to_the_page_that_was_asked_for(ada: User) -> None:
    response = sign_in(Client(), "ada", seed.PASSWORD, next="/hosts/")
    assert (response.status_code, response.headers["Location"]) == (302, "/hosts/")


def test_signing_in_never_leads_to_another_site(ada: User) -> None:
    response = sign_in(Client(), "ada", seed.PASSWORD, next="//elsewhere.example/")
    assert response.headers["Location"] == "/runs/"


def test_too_many_failures_block_the_name_from_this_address_only(ada: User, grace: User) -> None:
    client = Client()
    for _ in range(attempts.ALLOWED):
        assert b"do not match" in sign_in(client, "ada", "wrong").content
    blocked = sign_in(client, "ada", seed.PASSWORD)
    assert blocked.status_code == 429
    assert b"wait five minutes" in blocked.content
    assert sign_in(client, "grace", seed.PASSWORD).status_code == 302
    elsewhere = Client(REMOTE_ADDR="10.0.0.7")
    assert sign_in(elsewhere, "ada", seed.PASSWORD).status_code == 302


def test_success_forgets_failures(ada: User) -> None:
    for _ in range(2):
        for _ in range(attempts.ALLOWED - 1):
            sign_in(Client(), "ada", "wrong")
        assert sign_in(Client(), "ada", seed.PASSWORD).status_code == 302


def test_the_first_account_is_made_once_and_must_change_its_password() -> None:
    printed = io.StringIO()
    call_command("ensure_admin", stdout=printed)
    password = printed.getvalue().split("password:")[1].split()[0]
    again = io.StringIO()
    call_command("ensure_admin", stdout=again)
    assert again.getvalue() == ""
    assert User.objects.count() == 1

    client = Client()
    assert sign_in(client, "admin", password).status_code == 302
    for path in ("/runs/", "/account/", "/hosts/"):
        assert client.get(path).headers["Location"] == "/account/password/"
    same = {"old_password": password, "new_password1": password, "new_password2": password}
    assert b"choose a new one" in client.post("/account/password/", same).content
    new = {"old_password": password, "new_password1": "a much better one", "new_password2": "a much better one"}
    assert client.post("/account/password/", new).headers["Location"] == "/runs/"
    assert client.get("/runs/").status_code == 200
    assert User.objects.get().check_password("a much better one")


def test_an_account_that_exists_keeps_the_first_one_from_being_made(ada: User) -> None:
    call_command("ensure_admin", stdout=io.StringIO())
    assert User.objects.get() == ada


def test_a_token_is_shown_once_and_works_until_it_is_revoked(as_ada: Client, ada: User) -> None:
    made = as_ada.post("/account/tokens/", {"name": "laptop", "days": "30"})
    text = made.content.decode().split('id="token-text"')[1].split(">")[1].split("<")[0]
    assert made.headers["Cache-Control"] == "no-store"
    token = ApiToken.authenticate(text)
    assert token is not None
    assert token.user == ada
    assert token.expires_at is not None
    assert text not in as_ada.get("/account/").content.decode()
    as_ada.post(f"/account/tokens/{token.pk}/revoke/")
    assert ApiToken.authenticate(text) is None


def test_nobody_revokes_the_token_of_somebody_else(as_grace: Client, ada: User) -> None:
    token, text = ApiToken.create(ada, "laptop")
    assert as_grace.post(f"/account/tokens/{token.pk}/revoke/").status_code == 404
    assert ApiToken.authenticate(text) is not None


def test_signing_out_ends_the_session_and_takes_a_post(as_ada: Client) -> None:
    assert as_ada.get("/logout/").status_code == 405
    assert as_ada.post("/logout/").headers["Location"] == "/login/"
    assert as_ada.get("/runs/").status_code == 302


def test_an_admin_adds_people_and_locks_them_out(as_admin: Client, as_ada: Client) -> None:
    assert as_ada.get("/account/people/").status_code == 403
    assert as_ada.post("/account/people/", {"username": "eve"}).status_code == 403
    made = as_admin.post("/account/people/", {"username": "eve"}).content.decode()
    password = made.split('id="first-password"')[1].split(">")[1].split("<")[0]
    eve = User.objects.get(username="eve")
    assert (eve.must_change_password, eve.is_superuser) == (True, False)
    assert eve.check_password(password)
    assert password not in as_admin.get("/account/people/").content.decode()
    assert "already exists" in as_admin.post("/account/people/", {"username": "eve"}).content.decode()
    _, token = ApiToken.create(eve, "hers")
    as_admin.post(f"/account/people/{eve.pk}/", {"action": "lock"})
    assert "do not match" in sign_in(Client(), "eve", password).content.decode()
    assert ApiToken.authenticate(token) is None
    as_admin.post(f"/account/people/{eve.pk}/", {"action": "unlock"})
    assert sign_in(Client(), "eve", password).status_code == 302


def test_an_admin_can_not_lock_out_themselves(as_admin: Client, admin: User) -> None:
    page = as_admin.post(f"/account/people/{admin.pk}/", {"action": "lock"}, follow=True).content.decode()
    assert "your own account" in page


def test_failures_are_counted_together_by_all_web_processes_and_forgotten_after_a_while(
    client: Client, ada: User
) -> None:
    wrong = {"username": "ada", "password": "wrong"}
    for _ in range(attempts.ALLOWED):
        client.post("/login/", wrong)
    cache.clear()  # what one process keeps for itself
    assert client.post("/login/", wrong).status_code == 429
    FailedSignIn.objects.update(ends_at=timezone.now())
    assert client.post("/login/", wrong).status_code == 200
    assert FailedSignIn.objects.get().count == 1
