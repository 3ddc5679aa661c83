"""Pages while 32 runs report and 20 browsers poll, and pages of large runs: on SQLite and on PostgreSQL, beside their bars.

python bench/metrics_load.py [--seconds 20] [--runs 32] [--clients 20] [--database sqlite|postgresql] [--load-only]

Under a minute each. Ends with 1 when a point was lost or a database was locked; a missed bar is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.support import pages
from bench.support.bars import Bar, table
from bench.support.load import under_load
from bench.support.postgresql import Unavailable, cluster
from bench.support.studio import set_up, web_server

BARS = (
    Bar("p99", "p99 of pages, 32 runs report", "ms", 300),
    Bar("list", "list of 10,000 runs", "ms", 100),
    Bar("queries", "  its queries", "", 5),
    Bar("names", "names of 2,000 metrics", "ms", 300),
    Bar("names_page", "page of that run", "ms", 300),
    Bar("charts_100", "100 of its charts", "ms", 300),
    Bar("log_end", "end of a log of 100 MiB", "ms", 300),
    Bar("log_search", "search through all of it", "ms", 1000),
    Bar("total", "60 charts interactive, Chromium", "ms", 1500),
    Bar("thread", "  main thread of that, CPU", "ms", 1500),
)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=20)
    options.add_argument("--runs", type=int, default=32)
    options.add_argument("--clients", type=int, default=20)
    options.add_argument("--database", choices=("sqlite", "postgresql"), help="only this one; by default both")
    options.add_argument("--load-only", action="store_true", help="leave out the pages of large runs")
    options.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.inside:
        print(json.dumps(measure(Path(arguments.inside), arguments)))
        return 0
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    results: dict[str, dict[str, Any]] = {}
    if arguments.database != "postgresql":
        results["SQLite"] = studio({"DATABASE_URL": ""})
    if arguments.database != "sqlite":
        try:
            with cluster() as environment:
                results["PostgreSQL"] = studio(environment)
        except Unavailable as reason:
            print(f"PostgreSQL is left out: {reason}")
    return report(results, arguments)


def studio(environment: dict[str, str]) -> dict[str, Any]:
    """What a fresh process measures on a fresh database."""
    with tempfile.TemporaryDirectory(prefix="offbeat-load-") as home:
        command = [sys.executable, __file__, "--inside", home, *sys.argv[1:]]
        done = subprocess.run(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True, timeout=1800
        )
        return json.loads(done.stdout.splitlines()[-1])


def measure(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    set_up(home)
    from webapp.accounts.models import User

    owner = User.objects.create_user("bench")
    found: dict[str, Any] = {}
    with web_server(home) as url:
        load = under_load(url, owner, arguments.runs, arguments.clients, arguments.seconds)
        found |= {"load": asdict(load), "p99": load.p99()}
        if not arguments.load_only:
            large, session = pages.seed(owner), pages.session_of(owner)
            found |= pages.page_times(url, session, large)
            found["queries"] = pages.list_queries(owner)
            found |= in_chromium(url, session, large)
    return found


def in_chromium(url: str, session: str, large: pages.Large) -> dict[str, float]:
    """The better of two looks; empty without a Chromium."""
    path = pages.find_chromium()
    if path is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        looks = [pages.interactive(browser, url, session, large) for _ in range(2)]
        browser.close()
    return min(looks, key=lambda look: look["total"])


def report(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> int:
    print(f"{arguments.runs} runs report, {arguments.clients} browsers poll, {arguments.seconds:.0f} s; "
          f"load {os.getloadavg()[0]:.1f} after")  # fmt: skip
    lost = 0
    for name, found in results.items():
        load = found["load"]
        failures = "; ".join(load["failures"][:3]) or "none"
        print(f"{name}: {load['points']:,} points written, {load['stored']:,} stored; failures: {failures}")
        lost += bool(load["failures"]) or load["points"] != load["stored"]
        for kind, times in sorted(load["times"].items()):
            ordered = sorted(times)
            p99 = ordered[min(len(times) * 99 // 100, len(times) - 1)]
            print(
                f"  {kind:30}{len(times):>6} requests   median {ordered[len(times) // 2]:6.0f} ms   p99 {p99:6.0f} ms"
            )
    print(table(BARS, results))
    for name, found in results.items():
        if "charts" in found:
            print(
                f"{name}: {found['mounted']:.0f} of {found['charts']:.0f} charts mounted; the others wait for the scroll"
            )
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
