"""The charts of a run in a real browser: live, zoomed together, and true to the numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.webapp import seed
from tests.webapp.browser.conftest import Studio, Watched

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEED = """
import json, math, time
import orjson
from tests.webapp import seed
from webapp.metrics.store import ship_spool
from webapp.checkpoints.models import Checkpoint
from webapp.runs.models import Attempt
from django.utils import timezone
linus = seed.make_user("linus")

def ship(attempt, points, **others):
    lines = [{"v": 1, "kind": "metrics", "t": 1.7e9 + 5 * step, "step": step, "values": {**values, **others}}
             for step, values in points]
    data = b"".join(orjson.dumps(line) + b"\\n" for line in lines)
    attempt.refresh_from_db()
    ship_spool(attempt, attempt.spool_offset, data)

def spike(step):
    return 9.0 if step == 3333 else 0.01 * math.sin(step)

long = seed.make_run(linus, "long", steps=0, rollouts=False)
ship(long.attempts.get(), [(step, {"loss": spike(step), "reward": step / 6000, "kl": "nan" if step == 4000 else 0.1})
                           for step in range(1, 6001)])
resumed = seed.make_run(linus, "resumed", steps=0, rollouts=False)
first = resumed.attempts.get()
ship(first, [(step, {"reward": 0.1}) for step in range(1, 31)])
checkpoint = Checkpoint.objects.create(run=resumed, attempt=first, step=20, kind="adapter", created_at=timezone.now())
second = Attempt.objects.create(run=resumed, number=2, state="running", resumed_from=checkpoint)
ship(second, [(step, {"reward": 0.9}) for step in range(21, 26)], **{"<img src=x onerror=alert(1)>/it's \\"odd\\"": 1.0})
parts = seed.make_run(linus, "parts", steps=0, rollouts=False)
for steps, values in ((range(1, 41), {"perf/fwd_bwd_s": 6.0, "sample/staleness_mean": 0.5}),
                      ((20, 40), {"perf/checkpoint_s": 2.0})):
    ship(parts.attempts.get(), [(step, values) for step in steps])
empty = seed.make_run(linus, "empty", steps=0, rollouts=False)
print(json.dumps({run.name: str(run.pk) for run in (long, resumed, parts, empty)}))
"""

STEP = """
import orjson, time
from webapp.metrics.store import ship_spool
from webapp.runs.models import Run
attempt = Run.objects.get(pk="{run}").current_attempt
line = {{"v": 1, "kind": "metrics", "t": time.time(), "step": {step}, "values": {{"reward": {reward}}}}}
ship_spool(attempt, attempt.spool_offset, orjson.dumps(line) + b"\\n")
"""


@pytest.fixture(scope="module")
def runs(studio: Studio) -> dict[str, str]:
    return json.loads(studio.run_code(SEED))


@pytest.fixture
def linus(web: Watched, runs: dict[str, str]) -> Watched:
    web.sign_in("linus", seed.PASSWORD)
    return web


def drawn(page: Page, key: str) -> dict[str, Any]:
    """Data and layout that Plotly shows in a chart, once it does."""
    page.locator(f"#chart-{key}").scroll_into_view_if_needed()
    page.wait_for_selector(f"#chart-{key} .js-plotly-plot .main-svg, #chart-{key} .js-plotly-plot.chart-body .main-svg")
    script = f"""() => {{
        const plot = document.querySelector('#chart-{key} .js-plotly-plot');
        return {{data: plot.data, range: plot._fullLayout.xaxis.range, yrange: plot._fullLayout.yaxis.range}};
    }}"""
    return page.evaluate(script)


def test_the_first_points_arrive_without_a_reload(linus: Watched, studio: Studio, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['empty']}/")
    expect(page.locator("#chart-reward .chart-empty")).to_have_text(
        "No value yet: appears with the first optimizer step."
    )
    expect(page.locator(".chart-status")).to_contain_text("Live")
    page.evaluate("window.stayed = true")
    studio.run_code(STEP.format(run=runs["empty"], step=1, reward=0.25))
    page.wait_for_selector("#chart-reward .js-plotly-plot .main-svg", timeout=10_000)
    trace = drawn(page, "reward")["data"][0]
    assert (trace["x"], trace["y"], "markers" in trace["mode"]) == ([1], [0.25], True)
    studio.run_code(STEP.format(run=runs["empty"], step=2, reward=0.75))
    page.wait_for_function(
        "() => document.querySelector('#chart-reward .js-plotly-plot').data[0].x.length === 2", timeout=10_000
    )
    assert page.evaluate("window.stayed")


def test_a_zoom_holds_in_all_charts_and_in_the_url_while_points_arrive(
    linus: Watched, studio: Studio, runs: dict[str, str]
) -> None:
    page = linus.go(f"/runs/{runs['long']}/")
    assert drawn(page, "reward")["range"][1] >= 6000
    drawn(page, "loss")
    page.locator("#chart-loss").scroll_into_view_if_needed()
    box = page.locator("#chart-loss .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    page.wait_for_function("() => new URLSearchParams(location.search).has('from')")
    low, high = page.evaluate("['from', 'to'].map((key) => Number(new URLSearchParams(location.search).get(key)))")
    assert 2500 < low < 3300
    assert 3400 < high < 4000
    for key in ("loss", "reward"):
        assert drawn(page, key)["range"] == pytest.approx([low, high])
    page.wait_for_function(  # asked again for the part shown, now point by point
        f"() => document.querySelector('#chart-loss .js-plotly-plot').data.every((trace) => trace.x.length <= {high - low + 2})"
    )
    loss = drawn(page, "loss")["data"][0]
    assert max(loss["y"]) == 9.0
    assert loss["x"] == list(range(int(low) + 1, int(high) + 1))
    studio.run_code(STEP.format(run=runs["long"], step=6001, reward=1.0))
    page.wait_for_timeout(3500)
    assert drawn(page, "loss")["range"] == pytest.approx([low, high])
    page.reload()
    assert drawn(page, "reward")["range"] == pytest.approx([low, high])
    page.get_by_role("button", name="Reset zoom").click()
    page.wait_for_function("() => !new URLSearchParams(location.search).has('from')")
    page.wait_for_function(
        "() => document.querySelector('#chart-reward .js-plotly-plot')._fullLayout.xaxis.range[1] >= 6001"
    )


def test_a_spike_and_a_nan_are_seen_from_afar(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['long']}/")
    loss = drawn(page, "loss")
    assert all(len(trace["x"]) <= 2001 for trace in loss["data"])
    assert max(value for trace in loss["data"] for value in trace["y"] if value is not None) == 9.0
    assert loss["yrange"][1] >= 9.0
    crosses = [trace for trace in drawn(page, "kl")["data"] if trace.get("yaxis") == "y2"]
    assert crosses[0]["text"] == ["kl is nan among 4 points up to step 4003"]
    page.get_by_label("Hide outliers").check()
    page.wait_for_function("() => document.querySelector('#chart-loss .js-plotly-plot')._fullLayout.yaxis.range[1] < 1")
    page.get_by_label("Log scale").check()
    page.wait_for_function(
        "() => document.querySelector('#chart-reward .js-plotly-plot')._fullLayout.yaxis.type === 'log'"
    )
    assert "log=1" in page.url
    assert "outliers=0" in page.url


def test_a_superseded_attempt_is_a_trace_of_its_own(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['resumed']}/")
    now, old = drawn(page, "reward")["data"][:2]
    assert now["x"] == list(range(1, 26))
    assert old["x"] == list(range(21, 31))
    assert old["opacity"] < 1
    assert "superseded" in old["hovertemplate"]
    assert (
        page.evaluate("document.querySelector('#chart-reward .js-plotly-plot').layout.annotations[0].text")
        == "attempt 2"
    )


def test_axis_and_smoothing(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['long']}/?axis=time&smooth=0.9")
    reward = drawn(page, "reward")
    assert page.evaluate("document.querySelector('#chart-reward .js-plotly-plot')._fullLayout.xaxis.type") == "date"
    raw, smooth = [trace for trace in reward["data"] if trace.get("yaxis") != "y2" and not trace.get("hoverinfo")][
        -1:
    ] * 2
    assert smooth["y"][0] == pytest.approx(raw["y"][0])
    assert any(trace.get("opacity") == 0.3 for trace in reward["data"])
    page.get_by_label("Axis").select_option("step")
    page.wait_for_function(
        "() => document.querySelector('#chart-reward .js-plotly-plot')._fullLayout.xaxis.type === 'linear'"
    )
    assert "axis" not in page.url


def test_every_metric_is_found_and_its_name_is_only_text(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['resumed']}/")
    page.get_by_label("Search all metrics").fill("onerror")
    chart = page.locator("#all-metrics .chart:visible")
    expect(chart).to_have_count(1)
    expect(chart.locator("h3")).to_have_text('<img src=x onerror=alert(1)>/it\'s "odd"')
    chart.scroll_into_view_if_needed()
    page.wait_for_selector("#all-metrics .js-plotly-plot .main-svg")
    assert page.locator("#all-metrics img").count() == 0


def test_a_lost_connection_is_said_and_healed(linus: Watched, runs: dict[str, str], context: BrowserContext) -> None:
    page = linus.go(f"/runs/{runs['resumed']}/")
    drawn(page, "reward")
    context.set_offline(True)
    expect(page.locator(".chart-status")).to_have_text("Connection lost; trying again.", timeout=10_000)
    context.set_offline(False)
    expect(page.locator(".chart-status")).to_contain_text("updated", timeout=15_000)
    linus.complaints.clear()  # the browser's own notes about being offline


def test_a_picture_of_a_chart_is_saved(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['long']}/")
    drawn(page, "reward")
    with page.expect_download() as waiting:
        page.locator("#chart-reward").get_by_role("button", name="PNG").click()
    path = waiting.value.path()
    assert waiting.value.suggested_filename == "Reward.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_staleness_has_a_line_at_its_bound(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['parts']}/")
    assert drawn(page, "staleness")["yrange"][1] > 1  # the curve is at 0.5
    layout = "document.querySelector('#chart-staleness .js-plotly-plot').layout"
    for scale, place in (("linear", 1), ("log", 0)):
        if scale == "log":
            page.get_by_label("Log scale").check()
            page.wait_for_function(f"() => {layout}.yaxis.type === 'log'")
        line, label = page.evaluate(f"[{layout}.shapes[0], {layout}.annotations[0]]")
        assert (line["y0"], line["y1"], line["line"]["dash"], label["y"]) == (1, 1, "dash", place)
        assert label["text"] == "max_staleness 1"


def test_all_points_are_exported_as_any_kind_of_file(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['parts']}/")
    menu = page.locator(".chart-toolbar .menu")
    for kind, start in (("CSV", b"metric,"), ("JSON lines", b'{"metric"'), ("Parquet", b"PAR1")):
        menu.locator("summary").click()
        with page.expect_download() as waiting:
            menu.get_by_role("link", name=kind).click()
        assert waiting.value.path().read_bytes().startswith(start), kind
        page.keyboard.press("Escape")


def test_every_point_of_a_chart_is_downloaded(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['long']}/")
    drawn(page, "reward")
    with page.expect_download() as waiting:
        page.locator("#chart-reward").get_by_role("link", name="CSV").click()
    assert len(waiting.value.path().read_text().splitlines()) >= 6001


def test_what_happens_rarely_is_a_peak_of_the_stack_and_no_dot(linus: Watched, runs: dict[str, str]) -> None:
    page = linus.go(f"/runs/{runs['parts']}/")
    traces = {trace["name"]: trace for trace in drawn(page, "step_time")["data"] if trace.get("stackgroup")}
    assert set(traces) == {"fwd_bwd_s", "checkpoint_s"}
    assert all(trace["mode"] == "lines" for trace in traces.values())
    assert traces["checkpoint_s"]["x"] == [20, 40]
    assert traces["checkpoint_s"]["stackgaps"] == "infer zero"
    plot = "document.querySelector('#chart-step_time .js-plotly-plot')"
    top = dict(map(tuple, page.evaluate(f"{plot}.calcdata[1].map((point) => [point.x, point.y])")))
    assert (top[19], top[20], top[21]) == pytest.approx((6.0, 8.0, 6.0))
    page.locator("#chart-step_time").screenshot(path=linus.shots / "stacked.png")
