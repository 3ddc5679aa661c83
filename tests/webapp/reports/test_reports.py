"""Reports: Markdown that can't hurt anybody, with live charts in it."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.audit.models import Entry
from webapp.reports import rendering
from webapp.reports.models import Report
from webapp.reports.rendering import BadChart, parse, render
from webapp.runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, "first <b>run</b>", state="completed", steps=3)


def block(*runs: Run, metrics: str = "reward", **lines: str) -> str:
    rest = "".join(f"{key}: {value}\n" for key, value in lines.items())
    return f"```chart\nruns: {', '.join(str(run.pk) for run in runs)}\nmetrics: {metrics}\n{rest}```\n"


def charts(text: str) -> list[dict[str, Any]]:
    return [json.loads(html.unescape(data)) for data in re.findall(r'data-report-chart="([^"]*)"', text)]


@pytest.mark.parametrize("text", [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "![x](https://example.org/a.png)",
    '<a href="x" onclick="alert(1)">x</a>', "```chart\nruns: <script>alert(1)</script>\nmetrics: a\n```",
    "[x](data:text/html,<script>alert(1)</script>)", "<style>*{display:none}</style>", "```\n</code><script>1</script>\n```",
    "```html\n<script>1</script>\n```", "<iframe src=//example.org>", "[x]: javascript:alert(1)\n\n[x]", "&#60;script&#62;1",
])  # fmt: skip
def test_nothing_in_a_text_becomes_live_html(text: str) -> None:
    made = render(text).html
    tags = set(re.findall(r"<\s*/?\s*([a-z0-9]+)", made))
    assert tags <= {"p", "a", "pre", "code", "div"}
    assert not re.search(r"<[^>]+\son\w+\s*=", made)
    assert not re.search(r'href="\s*(javascript|data):', made, re.IGNORECASE)
    assert "src=" not in re.sub(r"&lt;.*?&gt;", "", made)


def test_a_chart_names_its_runs_and_metrics(run: Run, ada: User) -> None:
    other = seed.make_run(ada, "second", state="completed", steps=2, seed=1)
    made = render("# Title\n\n" + block(run, other, metrics="reward, kl", title='Both "rates"', axis="time"))
    assert made.problems == []
    (chart,) = charts(made.html)
    assert chart["axis"] == "time"
    assert [metric["name"] for metric in chart["metrics"]] == ["reward", "kl"]
    assert [item["url"] for item in chart["runs"]] == [f"/api/runs/{run.pk}/chart", f"/api/runs/{other.pk}/chart"]
    assert "<b>run" not in made.html
    assert "first &lt;b&gt;run" in made.html
    by_address = f"```chart\nrun: http://host/runs/{run.pk}/?axis=time\nmetric: reward\n```"
    assert charts(render(by_address).html)[0]["runs"][0]["name"] == run.name


@pytest.mark.parametrize("text, sentence", [
    ("metrics: a", "names no run"), ("runs: 1\nmetrics: a", "names no run"),
    ("colour: red", "there are runs, metrics, title, axis"),
    ("runs: 00000000-0000-0000-0000-000000000000", "1 runs and 0 metrics"),
    ("runs: 00000000-0000-0000-0000-000000000000\nmetrics: a\naxis: y", "one of step, time, tokens; found 'y'"),
])  # fmt: skip
def test_a_chart_that_can_not_be_drawn_says_why(text: str, sentence: str) -> None:
    with pytest.raises(BadChart, match=sentence):
        parse(text)
    made = render(f"before\n\n```chart\n{text}\n```\n\nafter")
    assert len(made.problems) == 1
    assert 'data-testid="chart-problem"' in made.html
    assert "after" in made.html


def test_a_deleted_run_is_said_in_its_chart(run: Run) -> None:
    text = block(run)
    Run.objects.all().delete()
    assert "it may have been deleted" in render(text).html


def test_there_are_only_so_many_charts(run: Run) -> None:
    made = render(block(run) * (rendering.MOST_CHARTS + 2))
    assert (len(charts(made.html)), len(made.problems)) == (rendering.MOST_CHARTS, 2)


def test_a_report_is_written_previewed_read_and_deleted(as_ada: Client, as_grace: Client, run: Run) -> None:
    page = as_ada.get(f"/reports/new/?run={run.pk}").content.decode()
    assert str(run.pk) in page
    assert len(charts(as_ada.post("/reports/preview/", {"text": block(run)}).content.decode())) == 1
    as_ada.post("/reports/new/", {"title": "What helped", "text": f"So:\r\n\r\n{block(run)}"})
    report = Report.objects.get()
    path = f"/reports/{report.pk}/"
    assert "\r" not in report.text
    page = as_grace.get(path).content.decode()
    assert len(charts(page)) == 1
    assert "edit-report" not in page
    for denied in (f"{path}edit/", f"{path}delete/"):
        assert as_grace.post(denied, {"title": "mine", "text": "x"}).status_code == 403
    as_ada.post(f"{path}edit/", {"title": "What helped most", "text": "Nothing."})
    assert "What helped most" in as_ada.get("/reports/?search=most").content.decode()
    assert "No report matches" in as_ada.get("/reports/?search=least").content.decode()
    empty = as_ada.post(f"{path}edit/", {"title": "", "text": "kept"})
    assert (empty.status_code, "kept" in empty.content.decode()) == (422, True)
    as_ada.post(f"{path}delete/")
    assert not Report.objects.exists()
    deeds = Entry.objects.filter(action__startswith="report.").order_by("id").values_list("action", flat=True)
    assert list(deeds) == ["report.created", "report.changed", "report.deleted"]


def test_the_api_reads_and_writes_reports(as_ada: Client, as_grace: Client, run: Run) -> None:
    made = as_ada.post("/api/reports", {"title": "By a program", "text": block(run)}, content_type="application/json")
    assert made.status_code == 201, made.content
    path = f"/api/reports/{made.json()['id']}"
    assert [item["title"] for item in as_grace.get("/api/reports").json()] == ["By a program"]
    assert as_grace.get(path).json()["runs"] == [str(run.pk)]
    changed = {"title": "Changed", "text": "Nothing."}
    assert as_grace.put(path, changed, content_type="application/json").status_code == 403
    assert as_ada.put(path, changed, content_type="application/json").json()["title"] == "Changed"
    assert as_grace.delete(path).status_code == 403
    assert as_ada.delete(path).status_code == 204
    assert as_ada.get(path).status_code == 404
