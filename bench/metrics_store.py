"""The metrics store beside trackio's and MLflow's: the same work, on the same machine, in the same run.

    python bench/metrics_store.py [--short | --quick] [--no-peers]

Peers are installed into var/bench-venv at the first run. A series grows to 10^8 points on both databases, some ten
minutes each; --short stops at 10^7 on SQLite and at 10^6 on PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.support.bars import Bar, table  # noqa: E402
from bench.support.postgresql import Unavailable, cluster  # noqa: E402
from bench.support.studio import set_up, web_server  # noqa: E402

PEERS = ("trackio==0.43.*", "mlflow-skinny==3.17.*", "sqlalchemy", "alembic")
LINES, METRICS, LONG = 20_000, 50, 1_000_000
CHUNK = 2 * 2**20
GROWTH: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8)
REPEATS = 5
BARS = (
    Bar("ingest", "ingest in process", "points/s", 400_000, at_least=True),
    Bar("ingest_cpu", "  by processor time", "points/s", 400_000, at_least=True),
    Bar("http", "ingest over HTTP", "points/s", 50_000, at_least=True),
    Bar("bytes", "bytes a point", "", 24),
    Bar("chart", "chart of 1,000,000 points", "ms", 50),
    Bar("chart_cpu", "  by processor time", "ms", 50),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--short", action="store_true", help="stop growing at 10^7 (SQLite) and 10^6 points")
    options.add_argument("--quick", action="store_true", help="a tenth of everything, to see that it works")
    options.add_argument("--no-peers", action="store_true")
    options.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.quick:
        shrink()
    if arguments.inside:
        print(json.dumps(measure(Path(arguments.inside), arguments.short or arguments.quick)))
        return
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    begin = time.monotonic()
    print(f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores, load {load}")
    results = {"SQLite": studio({"DATABASE_URL": ""})}
    try:
        with cluster() as environment:
            results["PostgreSQL"] = studio(environment)
    except Unavailable as reason:
        print(f"PostgreSQL is left out: {reason}")
    peers = {} if arguments.no_peers else run_peers()
    report(results, peers)
    if arguments.quick:
        print("--quick: everything was a tenth of what its title says.")
    print(f"\n{time.monotonic() - begin:.0f} s; load {os.getloadavg()[0]:.1f} after")


def shrink() -> None:
    global LINES, LONG, GROWTH
    LINES, LONG, GROWTH = LINES // 10, LONG // 10, tuple(size // 10 for size in GROWTH)


def studio(environment: dict[str, str]) -> dict[str, Any]:
    """What a fresh process measures on a fresh database."""
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as home:
        command = [sys.executable, __file__, "--inside", home, *sys.argv[1:]]
        return last_json(command, {**os.environ, **environment})


def last_json(command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=3600
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_peers() -> dict[str, dict[str, Any]]:
    folder = ROOT / "var" / "bench-venv"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"Installing {', '.join(PEERS)} into {folder} ...", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS], check=True)
        (folder / "ready").touch()
    scripts = ROOT / "bench" / "peers"
    # MLflow takes less, since it would need minutes; its rate does not depend on how much.
    sizes = {"trackio": (LINES // 2, METRICS, LONG), "mlflow": (LINES // 25, METRICS, LONG // 20)}
    return {
        name: last_json([str(python), str(scripts / f"{name}_store.py"), *map(str, size)])
        for name, size in sizes.items()
    }


# ---- inside one studio


def measure(home: Path, short: bool) -> dict[str, Any]:
    set_up(home)
    from django.db import connection

    from webapp.accounts.models import ApiToken, User
    from webapp.runs.models import Run

    owner = User.objects.create_user("bench")
    run = Run.objects.create(name="wide", owner=owner, spec={})
    data = list(wide_lines())
    before = database_size(home)
    seconds, processor = ship(run, 1, data)
    found: dict[str, Any] = {
        "ingest": LINES * METRICS / seconds,
        "ingest_cpu": LINES * METRICS / processor,
        "growth": [],
    }
    found["bytes"] = (database_size(home) - before) / LINES / METRICS
    for size in (GROWTH[:2] if connection.vendor == "postgresql" else GROWTH[:3]) if short else GROWTH:
        found["growth"].append(grow(owner, size, home))
    long = next(item for item in found["growth"] if item["points"] == LONG)
    found |= {"chart": long["chart"], "chart_cpu": long["chart_cpu"]}
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _, token = ApiToken.create(owner, "bench")
    with web_server(home) as url:
        found["http"] = over_http(url, token, b"".join(data)[: 20 * CHUNK])
    return found


def wide_lines() -> Iterator[bytes]:
    """What a trainer writes: a line for each step, with METRICS values."""
    import orjson

    names = [f"group/metric_{index}" for index in range(METRICS)]
    for step in range(LINES):
        values = {name: math.sin(step * 0.37 + index) for index, name in enumerate(names)}
        line = {"v": 1, "t": 1.7e9 + 2.5 * step, "kind": "metrics", "step": step, "values": values}
        yield orjson.dumps(line) + b"\n"


def ship(run: Any, number: int, lines: list[bytes]) -> tuple[float, float]:
    """Seconds to store the lines as a supervisor does, chunk by chunk: of the clock, and of this process's processor time."""
    from webapp.metrics.store import ship_spool
    from webapp.runs.models import Attempt

    attempt = Attempt.objects.create(run=run, number=number)
    data = b"".join(lines)
    begin, processor = time.perf_counter(), time.process_time()
    offset = 0
    while offset < len(data):
        offset = ship_spool(attempt, offset, data[offset : offset + CHUNK])
    return time.perf_counter() - begin, time.process_time() - processor


def grow(owner: Any, size: int, home: Path) -> dict[str, float]:
    """One series of `size` points: rate, bytes a point, and milliseconds of its chart as a whole, zoomed in, and of its end."""
    import orjson

    from webapp.metrics import charts
    from webapp.metrics.store import ship_spool
    from webapp.runs.models import Attempt, Run

    run = Run.objects.create(name=f"{size} points", owner=owner, spec={})
    attempt = Attempt.objects.create(run=run, number=1)
    before, seconds, offset = database_size(home), 0.0, 0
    piece = 20_000
    for start in range(0, size, piece):
        lines = "".join(
            f'{{"v":1,"t":{1.7e9 + 0.5 * step},"kind":"metrics","step":{step},"values":{{"loss":{math.sin(step * 0.37)!r}}}}}\n'
            for step in range(start, min(start + piece, size))
        ).encode()
        begin = time.perf_counter()
        offset = ship_spool(attempt, offset, lines)
        seconds += time.perf_counter() - begin
    answer: dict[str, float] = {"points": size, "rate": size / seconds, "bytes": (database_size(home) - before) / size}
    for key, low, high in (
        ("chart", None, None),
        ("zoom", size * 0.4, size * 0.4 + 1000),
        ("tenth", size * 0.8, size * 0.9),
    ):
        times, processor = [], []
        for _ in range(REPEATS):
            begin, used = time.perf_counter(), time.process_time()
            orjson.dumps(charts.chart(run, ["loss"], low=low, high=high), option=orjson.OPT_SERIALIZE_NUMPY)
            times.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
        answer[key] = 1000 * sorted(times)[REPEATS // 2]
        answer[f"{key}_cpu"] = 1000 * sorted(processor)[REPEATS // 2]
    return answer


def database_size(home: Path) -> int:
    """Bytes of the database, with everything written down."""
    from django.db import connection

    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return (home / "db.sqlite3").stat().st_size
        cursor.execute("SELECT pg_database_size(current_database())")
        return int(cursor.fetchone()[0])


def over_http(url: str, token: str, data: bytes) -> float:
    """Points a second through POST /api/runs/<id>/metrics, one client."""
    import httpx

    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        run = client.post("/api/imports", json={"name": "http", "source": "bench"}).raise_for_status().json()["id"]
        offset = 0
        begin = time.perf_counter()
        while offset < len(data):
            answer = client.post(
                f"/api/runs/{run}/metrics", params={"offset": offset}, content=data[offset : offset + CHUNK]
            )
            stored = answer.raise_for_status().json()["offset"]
            if stored == offset:
                break  # what is left is no whole line
            offset = stored
        return data[:offset].count(b"\n") * METRICS / (time.perf_counter() - begin)


# ---- report


def report(results: dict[str, dict[str, Any]], peers: dict[str, dict[str, Any]]) -> None:
    named = {f"{name} {peer['version']}": peer for name, peer in peers.items()}
    print(table(BARS, results, named))
    for name, peer in named.items():
        if peer["chart_points"] != LONG:
            print(f"{name}'s chart is of {peer['chart_points']:,} points.")
    for name, one in results.items():
        print(
            f"\n{name}, one series{'':17}points/s in   bytes/point   chart ms   its CPU ms   1,000 points of it   a tenth of it"
        )
        for item in one["growth"]:
            print(f"{item['points']:>30,}{item['rate']:>18,.0f}{item['bytes']:>14.1f}{item['chart']:>11.1f}"
                  f"{item['chart_cpu']:>13.1f}"
                  f"{item['zoom']:>20.1f}{item['tenth']:>16.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
