"""A database of the first layout keeps every point when it is brought up to date."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from webapp.accounts.models import User
from webapp.metrics import reading
from webapp.metrics.appending import BLOCK_POINTS
from webapp.metrics.layout import POINT
from webapp.metrics.models import Pack, Series
from webapp.runs.models import Attempt, Run

OLD = [("metrics", "0002_blocks")]


def migrated(target: list[tuple[str, str]]) -> Any:
    executor = MigrationExecutor(connection)
    executor.migrate(target)
    return MigrationExecutor(connection).loader.project_state(target).apps


@pytest.mark.django_db(transaction=True)
def test_points_of_the_first_layout_are_kept() -> None:
    newest = [node for node in MigrationExecutor(connection).loader.graph.leaf_nodes() if node[0] == "metrics"]
    owner = User.objects.create_user("alice")
    run = Run.objects.create(name="old", owner=owner, spec={})
    attempt = Attempt.objects.create(run=run, number=1)
    points = np.zeros(2 * BLOCK_POINTS + 9, POINT)
    points["step"], points["value"] = np.arange(len(points)), np.sin(np.arange(len(points)))
    points["value"][3] = np.nan
    points["time"], points["offset"] = 1e9 + np.arange(len(points)), 70 * np.arange(len(points))
    old = migrated(OLD)
    try:
        series = old.get_model("metrics", "Series").objects.create(
            run_id=run.pk, attempt_id=attempt.pk, name="loss", points=len(points), first_step=0, blocks_written=2,
            tail=points[2 * BLOCK_POINTS :].tobytes(),
        )  # fmt: skip
        for number in range(2):
            part = points[number * BLOCK_POINTS : (number + 1) * BLOCK_POINTS]
            old.get_model("metrics", "Block").objects.create(
                series=series, number=number, first_step=part["step"][0], last_step=part["step"][-1], last_time=0,
                last_offset=part["offset"][-1], count=BLOCK_POINTS, finite=0, kinds=0, ordered=True, data=part.tobytes(),
            )  # fmt: skip
    finally:
        migrated(newest)
    kept = Series.objects.get()
    assert np.concatenate(list(reading.stream_points(kept))).tobytes() == points.tobytes()
    assert (kept.points, kept.blocks_written, kept.last_offset) == (len(points), 2, points["offset"][-1])
    assert len(bytes(Pack.objects.get().data)) > 0
