"""From Markdown to safe HTML. Raw HTML is shown as text, pictures are links, and a block like this is a live chart:

```chart
runs: <id or address of a run>, <another>
metrics: reward, kl
title: Both learning rates
```
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.urls import reverse
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from webapp.metrics.charts import describe_metric
from webapp.metrics.lines import MAX_NAME
from webapp.runs.models import Run

MOST_RUNS, MOST_METRICS, MOST_CHARTS = 12, 8, 40
KEYS = ("runs", "metrics", "title", "axis")
AXES = ("step", "time", "tokens")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class BadChart(ValueError):
    """A chart block that can't be drawn; the text is a sentence for its author."""


@dataclass(frozen=True)
class Chart:
    """What one block asks for."""

    runs: list[UUID]
    metrics: list[str]
    title: str = ""
    axis: str = "step"


@dataclass(frozen=True)
class Place:
    """Where the charts of a run come from for this reader, and its page if they may open it. None: not for them."""

    data: str
    page: str = ""


@dataclass
class Rendered:
    html: SafeString
    problems: list[str] = field(default_factory=list)


def inside(run: Run) -> Place:
    """For people who are signed in."""
    return Place(f"/api/runs/{run.pk}/chart", reverse("runs:detail", args=[run.pk]))


def parse(block: str) -> Chart:
    """Raises BadChart."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, block.splitlines())):
        key, colon, value = line.partition(":")
        key = {"run": "runs", "metric": "metrics"}.get(key.strip().lower(), key.strip().lower())
        if not colon or key not in KEYS:
            raise BadChart(
                f"A chart block has lines like 'runs: ...'; found {line[:60]!r}, and there are {', '.join(KEYS)}."
            )
        found[key] = f"{found[key]}, {value.strip()}" if key in found else value.strip()
    runs = list(dict.fromkeys(UUID(text) for text in _UUID.findall(found.get("runs", ""))))
    metrics = list(dict.fromkeys(filter(None, map(str.strip, found.get("metrics", "").split(",")))))
    if not runs:
        raise BadChart("A chart block names no run; write 'runs:' and the id or the address of one.")
    if len(runs) > MOST_RUNS or not 1 <= len(metrics) <= MOST_METRICS:
        raise BadChart(
            f"A chart block has {len(runs)} runs and {len(metrics)} metrics; up to {MOST_RUNS} and 1 to {MOST_METRICS} are "
            "allowed."
        )
    if any(len(name) > MAX_NAME for name in metrics):
        raise BadChart(f"A metric's name has up to {MAX_NAME} characters.")
    axis = found.get("axis", "step")
    if axis not in AXES:
        raise BadChart(f"A chart's axis is one of {', '.join(AXES)}; found {axis[:40]!r}.")
    return Chart(runs, metrics, found.get("title", "")[:160], axis)


def runs_in(text: str) -> list[Run]:
    """The runs that the charts of a text name."""
    return list(Run.objects.filter(pk__in=_named(text)).select_related("owner"))


def _named(text: str) -> set[UUID]:
    wanted: set[UUID] = set()
    for token in _parser().parse(text):
        if _is_chart(token):
            try:
                wanted |= set(parse(token.content).runs)
            except BadChart:
                continue
    return wanted


def render(text: str, place_of: Callable[[Run], Place | None] = inside) -> Rendered:
    """The HTML of a text. What is wrong with a chart stands in its place, and in `problems`."""
    runs = {run.pk: run for run in runs_in(text)}
    parser, problems, drawn = _parser(), [], 0

    def fence(tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        nonlocal drawn
        token = tokens[index]
        if not _is_chart(token):
            return f"<pre><code>{escape(token.content)}</code></pre>"
        drawn += 1
        try:
            if drawn > MOST_CHARTS:
                raise BadChart(f"A report has up to {MOST_CHARTS} charts; this is one too many.")
            return _figure(parse(token.content), runs, place_of)
        except BadChart as error:
            problems.append(str(error))
            return format_html('<div class="note warning" data-testid="chart-problem">{}</div>', str(error))

    renderer = parser.renderer
    assert isinstance(renderer, RendererHTML)
    renderer.rules["fence"] = fence  # type: ignore[assignment]
    html = parser.render(text)
    return Rendered(mark_safe(html), problems)  # safe: html is off in the parser, and a test tries to get through


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")


def _is_chart(token: Token) -> bool:
    return token.type == "fence" and token.info.strip().lower() == "chart"


def _figure(chart: Chart, runs: Mapping[UUID, Run], place_of: Callable[[Run], Place | None]) -> str:
    if missing := [str(pk) for pk in chart.runs if pk not in runs]:
        raise BadChart(f"There is no run {', '.join(missing)}; it may have been deleted.")
    shown = [(run, place) for pk in chart.runs if (place := place_of(run := runs[pk])) is not None]
    hidden = len(chart.runs) - len(shown)
    if not shown:
        raise BadChart("The runs of this chart are not shared.")
    title = chart.title or ", ".join(chart.metrics)
    data = {
        "axis": chart.axis, "metrics": [{"name": name, **describe_metric(name)} for name in chart.metrics],
        "runs": [{"name": run.name, "url": place.data, "live": run.is_live} for run, place in shown],
    }  # fmt: skip
    names = [
        format_html('<a href="{}">{}</a>', place.page, run.name) if place.page else escape(run.name)
        for run, place in shown
    ]
    note = format_html(" <span>{} more not shared</span>", hidden) if hidden else ""
    return format_html(
        '<figure class="chart report-chart" data-report-chart="{}" data-testid="report-chart"><div class="chart-head">'
        '<h3 title="{}">{}</h3><span class="chart-unit"></span></div><p class="chart-empty">Loading…</p>'
        '<div class="chart-body"></div><figcaption class="muted small">{}{}</figcaption></figure>',
        json.dumps(data), title, title, mark_safe(", ".join(names)), note,  # each part is escaped
    )  # fmt: skip


def template_for(runs: Sequence[Run]) -> str:
    """The text that a new report begins with."""
    ids = ", ".join(str(run.pk) for run in runs) or "<id or address of a run>"
    return (
        "What was the question?\n\n"
        f"```chart\nruns: {ids}\nmetrics: reward\ntitle: Reward\n```\n\n"
        "What came out, and what follows?\n"
    )
