"""Share links: one run or one report, for a time, and nothing else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.audit.models import Entry
from webapp.reports.models import Report
from webapp.runs.models import Run
from webapp.secrets.services import store
from webapp.sharing.models import ShareLink

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(ada: User) -> Run:
    store(ada, "HF_TOKEN", "hf_very_secret")
    spec = seed.seeded_spec().model_copy(update={"secrets": ["HF_TOKEN"]})
    return seed.make_run(ada, "shared run", state="completed", steps=5, spec=spec)


@pytest.fixture
def other(ada: User) -> Run:
    return seed.make_run(ada, "another run", state="completed", steps=2, seed=1)


def share(client: Client, path: str, **fields: str) -> str:
    """The path of a new link."""
    page = client.post(path, {"days": "7", "note": "for Grace", **fields}).content.decode()
    return "/shared/" + page.split('id="share-address"')[1].split("/shared/")[1].split("<")[0]


def test_a_link_shows_the_run_s_charts_and_settings_without_an_account(
    as_ada: Client, client: Client, run: Run
) -> None:
    path = share(as_ada, f"/sharing/runs/{run.pk}/")
    answer = client.get(path)
    page = answer.content.decode()
    assert answer.status_code == 200
    assert f'data-url="{path}runs/{run.pk}/chart"' in page
    assert "model:" in page
    assert "HF_TOKEN" not in page
    assert "hf_very" not in page
    assert answer.headers["X-Robots-Tag"] == "noindex"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "private, no-store"
    chart = client.get(f"{path}runs/{run.pk}/chart?metric=reward").json()
    assert len(chart["series"][0]["y"]) == 5
    assert chart["events"] == []
    assert any(metric["name"] == "reward" for metric in client.get(f"{path}runs/{run.pk}/metrics").json())
    assert client.get(f"{path}runs/{run.pk}/metrics/export?metric=reward").status_code == 200
    link = ShareLink.objects.get()
    assert (link.opened, link.note) == (1, "for Grace")
    cursor = chart["cursor"]
    assert client.get(f"{path}runs/{run.pk}/chart", {"metric": "reward", "after": cursor}).status_code == 200


def test_the_token_is_stored_as_a_digest_and_shown_once(as_ada: Client, run: Run) -> None:
    path = share(as_ada, f"/sharing/runs/{run.pk}/")
    token = path.split("/")[2]
    assert token not in repr(list(ShareLink.objects.values()))
    assert token not in repr(list(Entry.objects.values()))
    assert token not in as_ada.get(f"/sharing/runs/{run.pk}/").content.decode()
    assert list(Entry.objects.filter(action__startswith="share.").values_list("action", "target")) == [
        ("share.created", "shared run")
    ]


def test_a_link_opens_nothing_else(as_ada: Client, client: Client, run: Run, other: Run) -> None:
    path = share(as_ada, f"/sharing/runs/{run.pk}/")
    assert client.get(f"{path}runs/{other.pk}/chart?metric=reward").status_code == 404
    assert client.get(f"{path}runs/{run.pk}/logs").status_code == 404
    client.get(path)
    for page in (f"/runs/{run.pk}/", f"/runs/{run.pk}/logs/", "/runs/", f"/runs/{run.pk}/spec.yaml"):
        assert client.get(page).headers["Location"].startswith("/login/")
    assert client.get(f"/api/runs/{run.pk}").status_code == 401
    assert client.post(path).status_code == 405


@pytest.mark.parametrize("how", ["ended", "revoked", "locked", "wrong", "deleted"])
def test_a_link_that_does_not_work_says_the_same_whatever_the_reason(
    as_ada: Client, client: Client, ada: User, run: Run, how: str
) -> None:
    path = share(as_ada, f"/sharing/runs/{run.pk}/")
    chart = f"{path}runs/{run.pk}/chart?metric=reward"
    if how == "ended":
        ShareLink.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    elif how == "revoked":
        assert as_ada.post(f"/sharing/links/{ShareLink.objects.get().pk}/revoke/").status_code == 302
        assert "revoked" in as_ada.get(f"/sharing/runs/{run.pk}/").content.decode()
    elif how == "locked":
        User.objects.filter(pk=ada.pk).update(is_active=False)
    elif how == "deleted":
        run.delete()
    else:
        path, chart = path.replace("/shared/", "/shared/x"), chart.replace("/shared/", "/shared/x")
    for answer in (client.get(path), client.get(chart)):
        assert answer.status_code == 404
        assert "This link does not work" in answer.content.decode()


def test_only_who_may_change_the_run_shares_it(as_grace: Client, as_ada: Client, run: Run) -> None:
    assert as_grace.post(f"/sharing/runs/{run.pk}/", {"days": "7"}).status_code == 403
    share(as_ada, f"/sharing/runs/{run.pk}/")
    page = as_grace.get(f"/sharing/runs/{run.pk}/").content.decode()
    assert 'data-testid="share-link"' in page
    assert "make-link" not in page
    link = ShareLink.objects.get()
    assert as_grace.post(f"/sharing/links/{link.pk}/revoke/").status_code == 403
    assert "1, 7, 30, 90 days; found &#x27;9999&#x27;" in as_ada.post(
        f"/sharing/runs/{run.pk}/", {"days": "9999"}
    ).content.decode()  # fmt: skip


def report_of(owner: User, *runs: Run) -> Report:
    ids = ", ".join(str(run.pk) for run in runs)
    return Report.objects.create(
        title="What helped", owner=owner, text=f"```chart\nruns: {ids}\nmetrics: reward\n```\n"
    )


def test_a_shared_report_shows_its_charts_and_no_links_into_the_studio(as_ada: Client, client: Client, ada: User, run: Run,
                                                                       other: Run) -> None:  # fmt: skip
    report = report_of(ada, run)
    path = share(as_ada, f"/sharing/reports/{report.pk}/")
    page = client.get(path).content.decode()
    assert f"{path}runs/{run.pk}/chart" in page
    assert f'href="/runs/{run.pk}/"' not in page
    assert client.get(f"{path}runs/{run.pk}/chart?metric=reward").status_code == 200
    assert client.get(f"{path}runs/{other.pk}/chart?metric=reward").status_code == 404
    assert "No report" not in as_ada.get(f"/reports/{report.pk}/").content.decode()


def test_a_report_does_not_open_the_runs_of_others(
    as_ada: Client, client: Client, ada: User, grace: User, run: Run
) -> None:
    foreign = seed.make_run(grace, "hers", state="completed", steps=2)
    report = report_of(ada, run, foreign)
    answer = as_ada.post(f"/sharing/reports/{report.pk}/", {"days": "7"})
    assert (answer.status_code, "hers (of grace)" in answer.content.decode()) == (422, True)
    report.text = report_of(ada, run).text
    report.save()
    path = share(as_ada, f"/sharing/reports/{report.pk}/")
    report.text = report_of(ada, run, foreign).text  # put in after it was shared
    report.save()
    page = client.get(path).content.decode()
    assert "1 more not shared" in page
    assert "hers" not in page
    assert client.get(f"{path}runs/{foreign.pk}/chart?metric=reward").status_code == 404


@pytest.mark.parametrize("query, status", [("metric=", 422), ("", 422), ("metric=a&axis=y", 422), ("metric=a&after=x", 422),
                                           ("metric=a&from=nan", 422), ("metric=a", 200)])  # fmt: skip
def test_a_wrong_question_is_refused_with_a_sentence(
    as_ada: Client, client: Client, run: Run, query: str, status: int
) -> None:
    path = share(as_ada, f"/sharing/runs/{run.pk}/")
    answer = client.get(f"{path}runs/{run.pk}/chart?{query}")
    assert answer.status_code == status
    assert status == 200 or answer.json()["detail"]
    assert client.get(f"{path}runs/{run.pk}/metrics/export?format=exe").status_code == 422


def test_a_link_shares_exactly_one_thing(ada: User, run: Run) -> None:
    fields: dict[str, Any] = {"owner": ada, "prefix": "x", "expires_at": timezone.now()}
    for wrong in ({}, {"run": run, "report": report_of(ada, run)}):
        with pytest.raises(IntegrityError), transaction.atomic():
            ShareLink.objects.create(**fields, **wrong, sha256=str(wrong)[:60])
