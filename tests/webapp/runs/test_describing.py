"""Name, tags and notes change at any time, by who may; an event and the audit log say what."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.audit.models import Entry
from webapp.runs.models import Run, State

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(ada: User) -> Run:
    spec = seed.seeded_spec().model_copy(update={"tags": ["old", "with, comma"], "notes": "before"})
    return seed.make_run(ada, "first name", steps=2, spec=spec)


def described(run: Run) -> tuple[str, list[str], str]:
    run.refresh_from_db()
    spec = run.run_spec()
    assert (run.name, run.tags) == (spec.name, spec.tags)  # the list and the settings say the same
    return run.name, run.tags, spec.notes


@pytest.mark.parametrize("state", [State.DRAFT, State.RUNNING, State.COMPLETED])
def test_a_person_changes_them_in_any_state_and_nothing_else_changes(as_ada: Client, run: Run, state: str) -> None:
    Run.objects.filter(pk=run.pk).update(state=state)
    before = run.spec
    sent = {"name": "second name", "tags": " new ,, other,new", "notes": "line\r\nline"}
    page = as_ada.post(f"/runs/{run.pk}/describe/", sent, follow=True).content.decode()
    assert "Saved." in page
    assert described(run) == ("second name", ["new", "other"], "line\nline")
    assert {key for key in before if before[key] != run.spec[key]} == {"name", "tags", "notes"}
    assert run.state == state
    event = run.events.get(name="described")
    assert event.text == "ada changed name “first name” to “second name”; tags to new, other; notes."
    assert event.data == {"before": {"name": "first name", "tags": ["old", "with, comma"], "notes": "before"}}
    assert Entry.objects.get(action="run.described").text == event.text


def test_what_is_the_same_or_not_sent_stays(as_ada: Client, run: Run) -> None:
    as_ada.post(f"/runs/{run.pk}/describe/", {"name": "first name", "tags": "old, with, comma", "notes": "before"})
    as_ada.post(f"/runs/{run.pk}/describe/", {})
    assert described(run) == ("first name", ["old", "with, comma"], "before")
    assert not run.events.filter(name="described").exists()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"name": ""}, "name: "), ({"name": "x" * 121}, "at most 120"), ({"notes": "a\x07"}, "control characters"),
        ({"tags": "x" * 61}, "A tag has 1 to 60 printable characters"),
        ({"tags": ",".join(map(str, range(51)))}, "There are 51 tags; a run has up to 50."),
    ],
)  # fmt: skip
def test_bad_input_is_said_and_changes_nothing(as_ada: Client, run: Run, sent: dict[str, str], words: str) -> None:
    assert words in as_ada.post(f"/runs/{run.pk}/describe/", sent, follow=True).content.decode()
    body = {key: value.split(",") if key == "tags" else value for key, value in sent.items()}
    answer = as_ada.patch(f"/api/runs/{run.pk}", body, content_type="application/json")
    assert answer.status_code == 422, answer.content
    assert described(run) == ("first name", ["old", "with, comma"], "before")


def test_only_the_owner_and_an_admin_may(as_grace: Client, as_admin: Client, run: Run) -> None:
    assert as_grace.post(f"/runs/{run.pk}/describe/", {"name": "mine"}).status_code == 403
    assert 'data-testid="describe"' not in as_grace.get(f"/runs/{run.pk}/").content.decode()
    as_admin.post(f"/runs/{run.pk}/describe/", {"name": "by an admin"})
    assert described(run)[0] == "by an admin"


def test_a_program_changes_one_of_them(as_ada: Client, run: Run) -> None:
    answer = as_ada.patch(f"/api/runs/{run.pk}", {"tags": ["a", "b"]}, content_type="application/json")
    assert (answer.status_code, answer.json()["tags"], answer.json()["name"]) == (200, ["a", "b"], "first name")
    wrong = as_ada.patch(f"/api/runs/{run.pk}", {"state": "completed"}, content_type="application/json")
    assert wrong.status_code == 422


def test_chosen_runs_get_a_tag(as_ada: Client, ada: User, grace: User, run: Run) -> None:
    own, other = seed.make_run(ada, "own", steps=0), seed.make_run(grace, "hers", steps=0)
    sent: dict[str, Any] = {"action": "tag", "tag": "good, old", "run": [str(item.pk) for item in (run, own, other)]}
    page = as_ada.post("/runs/bulk/", sent, follow=True).content.decode()
    assert "Tagged 2 runs." in page
    assert "hers: it belongs to somebody else." in page
    assert described(run)[1] == ["old", "with, comma", "good"]
    assert described(own)[1][-2:] == ["good", "old"]
    assert "good" not in described(other)[1]
    assert "Write the tag first." in as_ada.post("/runs/bulk/", {**sent, "tag": " "}, follow=True).content.decode()


def test_the_list_is_filtered_by_owner(as_ada: Client, ada: User, grace: User, run: Run) -> None:
    assert "filter-owner" not in as_ada.get("/runs/").content.decode()  # nothing to choose from
    seed.make_run(grace, "hers", steps=0)

    def shown(query: str) -> tuple[list[str], str]:
        page = as_ada.get(f"/runs/{query}").content.decode()
        chosen = re.search(r'name="owner".*?<option value="([^"]*)" selected', page, re.DOTALL)
        return re.findall(r'title="(first name|hers)"', page), chosen[1] if chosen else ""

    assert shown("") == (["hers", "first name"], "")
    assert shown("?owner=ada") == (["first name"], "ada")
    assert shown("?owner=grace") == (["hers"], "grace")
    assert shown("?owner=%3Cnobody%3E") == ([], "&lt;nobody&gt;")
