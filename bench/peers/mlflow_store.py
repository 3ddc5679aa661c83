"""MLflow's store, given the work that bench/metrics_store.py gives ours. Prints one JSON object. Runs in a venv of its own."""

import json
import logging
import math
import sys
import tempfile
import time
from pathlib import Path

import mlflow
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

POINTS_A_CALL = 1000  # as many as it takes


def main() -> None:
    lines, metrics, long = (int(text) for text in sys.argv[1:])
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    path = Path(tempfile.mkdtemp(prefix="mlflow-")) / "mlflow.db"
    client = MlflowClient(f"sqlite:///{path}")
    experiment = client.create_experiment("bench")
    empty = path.stat().st_size

    def ingest(lines: int, metrics: int) -> tuple[str, float]:
        run = client.create_run(experiment).info.run_id
        points = [
            Metric(f"group/metric_{index}", math.sin(step * 0.37 + index), 1_700_000_000_000 + step, step)
            for step in range(lines)
            for index in range(metrics)
        ]
        begin = time.perf_counter()
        for start in range(0, len(points), POINTS_A_CALL):
            client.log_batch(run, metrics=points[start : start + POINTS_A_CALL])
        return run, time.perf_counter() - begin

    _, seconds = ingest(lines, metrics)
    size = path.stat().st_size - empty
    run, _ = ingest(long, 1)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        client.get_metric_history(run, "group/metric_0")
        times.append(time.perf_counter() - begin)
    print(json.dumps({
        "version": mlflow.__version__, "ingest": lines * metrics / seconds, "bytes": size / lines / metrics,
        "chart": 1000 * min(times), "chart_points": long,
    }))  # fmt: skip


main()
