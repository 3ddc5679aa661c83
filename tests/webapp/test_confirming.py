"""Asking first where no script runs: the page in between changes nothing and passes everything on."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.runs.models import Run


def button(page: str, testid: str) -> str:
    """Where the button posts in a browser without scripts."""
    found = re.search(rf'<button[^>]*data-testid="{testid}"[^>]*formaction="([^"]*)"', page)
    assert found is not None, f"{testid} does not ask first"
    return unescape(found[1])


def hidden(page: str) -> dict[str, str]:
    return {
        unescape(name): unescape(value)
        for name, value in re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', page)
    }


def test_a_run_is_deleted_only_behind_the_page_that_asks(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, "mine & <ours>", state="completed", steps=1)
    page = as_ada.get(f"/runs/{run.pk}/").content.decode()
    asked = as_ada.post(button(page, "delete"))
    assert asked.status_code == 200
    text = asked.content.decode()
    assert "Delete “mine &amp; &lt;ours&gt;” with its checkpoints" in text
    assert Run.objects.filter(pk=run.pk).exists()
    target = re.search(r'<form method="post" action="([^"]+)" class="body', text)
    assert target is not None
    assert as_ada.post(target[1], hidden(text)).status_code == 302
    assert not Run.objects.filter(pk=run.pk).exists()


def test_what_was_chosen_in_the_list_is_passed_on(as_ada: Client, ada: User) -> None:
    runs = [seed.make_run(ada, name, state="completed", steps=0) for name in ("a", "b")]
    page = as_ada.get("/runs/").content.decode()
    found = re.search(r'<button[^>]*value="delete"[^>]*formaction="([^"]*)"', page)
    assert found is not None
    asked = as_ada.post(unescape(found[1]), {"action": "delete", "run": [str(run.pk) for run in runs]})
    text = asked.content.decode()
    assert [value for _, value in re.findall(r'name="(run)" value="([^"]+)"', text)] == [str(run.pk) for run in runs]
    assert 'name="action" value="delete"' in text
    assert Run.objects.count() == 2


@pytest.mark.parametrize(
    "to", ["https://elsewhere.example/", "//elsewhere.example/", "/no/such/page/", "", "javascript:alert(1)"]
)
def test_it_leads_nowhere_but_to_pages_of_the_studio(as_ada: Client, to: str) -> None:
    assert as_ada.post("/confirm/", query_params={"to": to, "question": "?"}).status_code == 400


def test_it_is_asked_by_post_and_after_signing_in_only(as_ada: Client, client: Client, db: Any) -> None:
    assert as_ada.get("/confirm/?to=/runs/").status_code == 405
    assert client.post("/confirm/?to=/runs/").status_code == 302
    checked = Client(enforce_csrf_checks=True)
    assert checked.post("/confirm/?to=/runs/").status_code in (302, 403)


def test_the_way_back_stays_in_the_studio(as_ada: Client) -> None:
    for page, back in (("http://testserver/hosts/", "http://testserver/hosts/"), ("https://elsewhere.example/", "/")):
        text = as_ada.post("/confirm/?to=/runs/bulk/", headers={"Referer": page}).content.decode()
        assert f'href="{back}">Cancel' in text


def test_no_button_asks_only_by_script() -> None:
    """Every question in a template is made by the tag, which has the page for browsers without scripts too."""
    templates = Path(__file__).resolve().parents[2] / "templates"
    alone = [
        str(path.relative_to(templates)) for path in templates.rglob("*.html") if "data-confirm=" in path.read_text()
    ]
    assert alone == []
