"""Large pages: many runs, many metrics, many charts, a large log. Seeds them and takes their times."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

RUNS = 10_000
NAMES = 2_000
CHARTS = 60
STEPS = 2_000
LOG_BYTES = 100 * 2**20
NEEDLE = "the only line of its kind"
REPEATS = 7
OVERVIEW = {"reward": 0, "loss": 1, "entropy": 2, "kl": 3, "sample/staleness_mean": 4, "perf/fwd_bwd_s": 5}
_DRAWN = """() => new Promise((resolve) => {
  const says = (chart) => chart.querySelector(".chart-empty")?.textContent ?? "";
  const settled = (chart) => chart.querySelector(".main-svg") || !/^(Loading…)?$/.test(says(chart));
  const check = () => {
    const seen = [...document.querySelectorAll(".chart")].filter((chart) => {
      const box = chart.getBoundingClientRect();
      return box.height && box.bottom > 0 && box.top < innerHeight;
    });
    if (seen.length && seen.every(settled)) resolve(performance.now());
    else requestAnimationFrame(check);
  };
  check();
})"""


@dataclass
class Large:
    """Ids of the runs that were seeded."""

    names: str
    charts: str
    log: str


def seed(owner: Any) -> Large:
    """10,000 runs; one with 2,000 metrics, one with 60 of 2,000 steps, and one with a log of 100 MiB."""
    from trainer_core.spec import RunSpec
    from webapp.runs.models import Run, State

    states = list(State.values)
    spec = RunSpec().model_dump(mode="json")
    Run.objects.bulk_create(
        (
            Run(
                name=f"sweep {index // 50} run {index}", owner=owner, spec=spec, state=states[index % len(states)],
                tags=[f"tag{index % 20}"],
                summary={"reward": index % 100 / 100, "step": index, "max_steps": RUNS, "tok_s": 1000.0 + index},
            )
            for index in range(RUNS)
        ),
        batch_size=500,
    )  # fmt: skip
    names = _run(owner, "many metrics", {f"layer.{index}/norm": index for index in range(NAMES)}, 30)
    charts = _run(
        owner, "many charts", {**OVERVIEW, **{f"own/metric_{index}": index for index in range(CHARTS)}}, STEPS
    )
    log = _run(owner, "large log", {"reward": 0}, 3)
    line = b"2026-11-30 12:00:00 INFO step 17: everything goes on as it did before, nothing to be seen in this line\n"
    with open(log.folder / "trainer.log", "wb") as file:
        for _ in range(100):
            file.write(line * (LOG_BYTES // 100 // len(line)))
        file.write(NEEDLE.encode() + b"\n")
    return Large(str(names.run_id), str(charts.run_id), str(log.run_id))


def _run(owner: Any, name: str, metrics: dict[str, int], steps: int) -> Any:
    import orjson

    from trainer_core.spec import RunSpec
    from webapp.metrics.store import ship_spool
    from webapp.runs.models import Attempt, Run, State

    spec = RunSpec().model_dump(mode="json")
    run = Run.objects.create(name=name, owner=owner, spec=spec, state=State.COMPLETED)
    attempt = Attempt.objects.create(run=run, number=1, state=State.COMPLETED)
    attempt.folder.mkdir(parents=True)
    lines = []
    for step in range(steps):
        values = {metric: math.sin(step * 0.01 + index) for metric, index in metrics.items()}
        lines.append(
            orjson.dumps({"v": 1, "kind": "metrics", "t": 1.7e9 + step, "step": step, "values": values}) + b"\n"
        )
    ship_spool(attempt, 0, b"".join(lines))
    return attempt


def session_of(owner: Any) -> str:
    """The cookie of a signed-in browser."""
    from django.test import Client

    browser = Client()
    browser.force_login(owner)
    return browser.cookies["sessionid"].value


def median_ms(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return 1000 * sorted(times)[REPEATS // 2]


def page_times(url: str, session: str, large: Large) -> dict[str, float]:
    """Milliseconds of each page, the median of some, as a browser waits for them."""
    with httpx.Client(base_url=url, cookies={"sessionid": session}, timeout=60) as client:

        def get(path: str, **query: Any) -> httpx.Response:
            return client.get(path, params=query).raise_for_status()

        def search() -> None:
            at, found = 0, 0
            while at is not None:
                answer = get(f"/runs/{large.log}/logs/data/", search=NEEDLE, after=at).json()
                at, found = answer["next"], found + len(answer["lines"])
            assert found == 1

        wanted = [f"layer.{index}/norm" for index in range(0, NAMES, NAMES // 100)]
        return {
            "list": median_ms(lambda: get("/runs/")),
            "names": median_ms(lambda: get(f"/api/runs/{large.names}/metrics")),
            "names_page": median_ms(lambda: get(f"/runs/{large.names}/")),
            "charts_100": median_ms(lambda: get(f"/api/runs/{large.names}/chart", metric=wanted)),
            "log_end": median_ms(lambda: get(f"/runs/{large.log}/logs/data/")),
            "log_search": median_ms(search),
        }


def list_queries(owner: Any) -> int:
    """Queries that the list of runs asks, those of the session included."""
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    browser = Client(headers={"host": "localhost"})
    browser.force_login(owner)
    with CaptureQueriesContext(connection) as queries:
        assert browser.get("/runs/").status_code == 200
    return len(queries)


def interactive(browser: Any, url: str, session: str, large: Large) -> dict[str, float]:
    """Milliseconds until the page of 60 charts has drawn what is in view: of the clock, and of the page's main thread.

    From the click on a link until the overview is drawn, and then from opening all metrics until those in view are drawn.
    """
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    try:
        context.add_cookies([{"name": "sessionid", "value": session, "url": url}])
        page = context.new_page()
        page.set_default_timeout(40_000)
        page.goto(f"{url}/runs/")  # styles and scripts of all pages are cached by now, as for anybody who opens a run
        devtools = context.new_cdp_session(page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(f"{url}/runs/{large.charts}/", wait_until="commit")
        overview = page.evaluate(_DRAWN)
        page.wait_for_selector("details.stage summary")
        page.evaluate("document.querySelectorAll('details.stage').forEach((stage) => { stage.open = true; })")
        page.evaluate("document.querySelector('details.stage').scrollIntoView()")
        begin = page.evaluate("performance.now()")
        opened = page.evaluate(_DRAWN) - begin
        metrics = {item["name"]: item["value"] for item in devtools.send("Performance.getMetrics")["metrics"]}
        return {
            "overview": overview, "opened": opened, "total": overview + opened, "thread": 1000 * metrics["TaskDuration"],
            "charts": page.evaluate("document.querySelectorAll('.chart').length"),
            "mounted": page.evaluate("document.querySelectorAll('.chart .main-svg').length"),
        }  # fmt: skip
    finally:
        context.close()


def find_chromium() -> str | None:
    """The system's Chromium, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
