"""Who did what is kept, found, exported, and never changed."""

from __future__ import annotations

import csv
import io
import json
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from webapp.accounts.models import ApiToken, User
from webapp.audit import log
from webapp.audit.models import AppendOnly, Entry
from webapp.runs.models import Run
from webapp.runs.services import create_run

pytestmark = pytest.mark.django_db
SOURCE = "def short(completions, **columns):\n    return [0.0 for c in completions]\n"


def deeds() -> list[tuple[str, str, str]]:
    return list(Entry.objects.order_by("id").values_list("actor_name", "action", "target"))


def test_an_entry_can_not_be_changed_or_deleted(ada: User) -> None:
    entry = log.record(ada, "thing.done", "Done.")
    entry.text = "Never happened."
    with pytest.raises(AppendOnly, match="never changed"):
        entry.save()
    with pytest.raises(AppendOnly):
        entry.delete()
    with pytest.raises(AppendOnly):
        Entry.objects.all().delete()
    with pytest.raises(AppendOnly):
        Entry.objects.update(text="x")
    assert Entry.objects.get().text == "Done."


def test_what_people_do_with_runs_is_noted(as_ada: Client, ada: User) -> None:
    run = create_run(seed.seeded_spec(), ada)
    path = f"/runs/{run.pk}/"
    Run.objects.filter(pk=run.pk).update(state="running")
    as_ada.post(f"{path}stop/", {"save": "1"})
    Run.objects.filter(pk=run.pk).update(state="stopped")
    as_ada.post(f"{path}resume/")
    as_ada.post(f"{path}stop/")
    as_ada.post(f"{path}archive/", {"archived": "1"})
    as_ada.post(f"{path}delete/")
    assert [action for _, action, _ in deeds()] == [
        "run.created", "run.stop_requested", "run.queued", "run.stopped", "run.archived", "run.deleted",
    ]  # fmt: skip
    assert {(who, name) for who, _, name in deeds()} == {("ada", run.name)}
    assert Entry.objects.get(action="run.deleted").target_id == str(run.pk)
    assert Entry.objects.filter(address="127.0.0.1").count() == 5  # the first was not a request


def test_accounts_tokens_rewards_and_sign_ins_are_noted(as_admin: Client, ada: User, client: Client) -> None:
    client.post("/login/", {"username": "ada", "password": "wrong"})
    client.post("/login/", {"username": "ada", "password": seed.PASSWORD})
    client.post("/account/tokens/", {"name": "laptop", "days": "30", "scope": "read"})
    client.post(f"/account/tokens/{ApiToken.objects.get().pk}/revoke/")
    client.post("/rewards/new/", {"source": SOURCE, "description": ""})
    as_admin.post("/account/people/", {"username": "eve", "role": "viewer"})
    as_admin.post(f"/account/people/{ada.pk}/", {"action": "role", "role": "viewer"})
    as_admin.post(f"/account/people/{ada.pk}/", {"action": "reset"})
    as_admin.post(f"/account/people/{ada.pk}/", {"action": "lock"})
    assert deeds() == [
        ("", "account.sign_in_failed", "ada"), ("ada", "account.signed_in", "ada"), ("ada", "token.created", "laptop"),
        ("ada", "token.revoked", "laptop"), ("ada", "reward.saved", "short"), ("root", "person.added", "eve"),
        ("root", "person.role_changed", "ada"), ("root", "person.password_reset", "ada"), ("root", "person.locked", "ada"),
    ]  # fmt: skip
    assert "may only read" in Entry.objects.get(action="token.created").text


def test_a_deed_through_the_api_names_the_token_and_never_its_text(ada: User) -> None:
    _, text = ApiToken.create(ada, "nightly")
    run = create_run(seed.seeded_spec(), ada)
    client = Client(headers={"Authorization": f"Bearer {text}"})
    assert client.delete(f"/api/runs/{run.pk}").status_code == 204
    entry = Entry.objects.get(action="run.deleted")
    assert (entry.actor_name, entry.via, entry.address) == ("ada", "nightly", "127.0.0.1")
    assert not any(text in str(row) for row in Entry.objects.values())
    log.record(ada, "thing.done", "Later, from somewhere else.")
    assert Entry.objects.get(action="thing.done").via == ""


def test_an_entry_outlives_the_account(ada: User) -> None:
    log.record(ada, "thing.done", "Done.")
    ada.delete()
    entry = Entry.objects.get()
    assert (entry.actor, entry.actor_name) == (None, "ada")


def test_the_page_filters_and_exports(as_admin: Client, ada: User, grace: User) -> None:
    log.record(ada, "run.deleted", "=1+1", name="first")
    log.record(grace, "token.created", "Second sentence.")
    page = as_admin.get("/audit/?actor=grace").content.decode()
    assert page.count('data-testid="audit-entry"') == 1
    assert "Second sentence." in page
    assert "Nothing matches" in as_admin.get("/audit/?actor=grace&action=run.deleted").content.decode()
    tomorrow = (timezone.now() + timedelta(days=1)).date()
    assert "Nothing matches" in as_admin.get(f"/audit/?since={tomorrow}").content.decode()
    wrong = as_admin.get("/audit/?since=yesterday")
    assert (wrong.status_code, "2026-11-30" in wrong.content.decode()) == (400, True)

    rows = list(csv.DictReader(io.StringIO(as_admin.get("/audit/export/").getvalue().decode())))
    assert [row["target"] for row in rows] == ["first", ""]
    assert rows[0]["text"] == "'=1+1"  # a spreadsheet must not compute it
    lines = as_admin.get("/audit/export/?format=jsonl&search=second").getvalue().decode().splitlines()
    assert [json.loads(line)["actor_name"] for line in lines] == ["grace"]
    assert [row["text"] for row in as_admin.get("/api/audit?actor=ada").json()] == ["=1+1"]


def test_only_admins_read_it(as_ada: Client) -> None:
    for path in ("/audit/", "/audit/export/", "/api/audit"):
        assert as_ada.get(path).status_code == 403
    assert "Audit log" not in as_ada.get("/runs/").content.decode()
