"""trackio's store, given the work that bench/metrics_store.py gives ours. Prints one JSON object. Runs in a venv of its own."""

import json
import math
import os
import sys
import tempfile
import time

folder = tempfile.mkdtemp(prefix="trackio-")
os.environ["TRACKIO_DIR"] = folder

import trackio  # noqa: E402
from trackio.sqlite_storage import SQLiteStorage  # noqa: E402

LINES_A_CALL = 1000


def ingest(run: str, lines: int, metrics: int) -> float:
    """Seconds to store `lines` steps of `metrics` values."""
    names = [f"group/metric_{index}" for index in range(metrics)]
    seconds = 0.0
    for start in range(0, lines, LINES_A_CALL):
        steps = list(range(start, min(start + LINES_A_CALL, lines)))
        rows = [{name: math.sin(step * 0.37 + index) for index, name in enumerate(names)} for step in steps]
        begin = time.perf_counter()
        SQLiteStorage.bulk_log("bench", run, rows, steps=steps)
        seconds += time.perf_counter() - begin
    return seconds


def main() -> None:
    lines, metrics, long = (int(text) for text in sys.argv[1:])
    seconds = ingest("wide", lines, metrics)
    size = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    ingest("long", long, 1)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        SQLiteStorage.get_metric_values("bench", "long", "group/metric_0", max_points=2000)
        times.append(time.perf_counter() - begin)
    print(json.dumps({
        "version": trackio.__version__, "ingest": lines * metrics / seconds, "bytes": size / lines / metrics,
        "chart": 1000 * min(times), "chart_points": long,
    }))  # fmt: skip


main()
