"""Single points of old runs may be dropped, when an admin says so: never silently, and every chart keeps its spikes."""

from __future__ import annotations

import csv
import io
import math
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from django.test import Client
from django.utils import timezone

from tests.webapp.conftest import signed_in
from tests.webapp.metrics.test_reading import curve, exported, write
from webapp.accounts.models import User
from webapp.metrics import charts, reading, retention
from webapp.metrics.appending import BLOCK_POINTS
from webapp.metrics.layout import FAN
from webapp.metrics.models import Block, Retention, Series
from webapp.runs.models import Attempt, Run, State

BLOCKS = 42
SPIKE = 5000


@pytest.fixture
def ended(run: Run, attempt: Attempt) -> Run:
    """42 full blocks and a tail, with a spike, a NaN and an infinity; a second attempt took over at step 10,000."""
    odd = {SPIKE: 1e6, 700: math.nan, 701: math.inf}
    write(attempt, [(step, odd.get(step, math.sin(step))) for step in range(BLOCKS * BLOCK_POINTS + 9)])
    write(Attempt.objects.create(run=run, number=2), [(step, math.cos(step)) for step in range(10_000, 10_600)])
    run.state, run.ended_at = State.COMPLETED, timezone.now() - timedelta(days=10)
    run.save()
    return run


def allow(**days: int) -> Retention:
    return Retention.objects.create(**days)


def points_left(run: Run) -> dict[int, int]:
    return {
        series.attempt.number: sum(map(len, reading.stream_points(series)))
        for series in run.series.select_related("attempt")
    }


def test_nothing_is_dropped_unless_it_is_allowed(ended: Run) -> None:
    assert retention.drop_all() == (0, 0)
    allow()
    assert retention.drop_all() == (0, 0)
    Retention.objects.update(ended_days=11, superseded_days=11)
    assert retention.drop_all() == (0, 0)
    assert not ended.events.exists()


def test_live_runs_are_left_alone(ended: Run) -> None:
    allow(ended_days=1)
    [found] = retention.droppable(retention.setting(), timezone.now())
    Run.objects.update(state=State.RUNNING)
    assert list(retention.droppable(retention.setting(), timezone.now())) == []
    assert retention.drop(found) == (0, 0)  # resumed after it was looked at


def test_superseded_points_go_and_the_runs_own_stay_whole(ended: Run) -> None:
    before = charts.chart(ended, ["loss"], low=9000, high=10_100)
    allow(superseded_days=10)
    points, size = retention.drop_all()
    # The last block stays, and so does the one that the second attempt cuts.
    gone = Block.objects.filter(data=b"").values_list("first_step", flat=True)
    assert gone
    assert min(gone) >= 10_000
    assert points == len(gone) * BLOCK_POINTS
    assert size > 0
    after = charts.chart(ended, ["loss"], low=9000, high=10_100)
    assert str(curve(after)) == str(curve(before))
    event = ended.events.get()
    assert (event.name, event.data["points"]) == ("points_dropped", points)
    assert "superseded" in event.text
    assert Series.objects.get(attempt__number=1).dropped_points == points
    assert charts.catalog(ended)[0]["dropped_points"] == points
    assert retention.drop_all() == (0, 0)


def test_charts_of_what_is_left_keep_every_spike_and_count(ended: Run) -> None:
    before: Any = curve(charts.chart(ended, ["loss"]))
    allow(ended_days=10)
    points, _ = retention.drop_all()
    whole = (
        BLOCKS - 2 + 1
    )  # all of the first attempt but its last block and the one that is cut; one of the second's two
    assert points == whole * BLOCK_POINTS
    after: Any = curve(charts.chart(ended, ["loss"]))
    assert after["points"] == before["points"]
    assert (np.nanmax(after["high"]), np.nanmin(after["low"])) == (np.nanmax(before["high"]), np.nanmin(before["low"]))
    near: Any = curve(charts.chart(ended, ["loss"], low=SPIKE - 40, high=SPIKE + 40))
    assert near["high"].max() == 1e6
    assert near["count"].max() == FAN
    assert near["points"] >= 81
    odd: Any = curve(charts.chart(ended, ["loss"], low=690, high=710))
    assert [kinds for _, kinds in odd["odd"]] == [["nan", "inf"]]


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators")
@pytest.mark.django_db(transaction=True)
def test_an_export_says_what_its_rows_stand_for(ended: Run, owner: User) -> None:
    allow(ended_days=10)
    retention.drop_all()
    rows = list(csv.DictReader(io.StringIO(exported(signed_in(owner), ended).decode())))
    counts = np.array([int(row["points"]) for row in rows])
    assert set(counts.tolist()) == {1, FAN}
    assert counts.sum() == BLOCKS * BLOCK_POINTS + 9 + 600


def test_series_with_late_points_stay_whole(run: Run, attempt: Attempt) -> None:
    write(attempt, [(step, 1.0) for step in [*range(20 * BLOCK_POINTS), *range(10)]])
    Run.objects.update(state=State.FAILED, ended_at=timezone.now() - timedelta(days=3))
    allow(ended_days=1, superseded_days=1)
    assert retention.drop_all() == (0, 0)


def test_a_resumed_run_goes_on_and_keeps_its_shape(ended: Run) -> None:
    allow(ended_days=10)
    retention.drop_all()
    write(Attempt.objects.create(run=ended, number=3), [(step, 2.0) for step in range(10_300, 10_900)])
    found: Any = curve(charts.chart(ended, ["loss"]))
    assert found["points"] == 10_900
    assert found["high"].max() == 1e6


def test_the_page_shows_it_to_all_and_lets_admins_change_it(ended: Run, owner: User, admin: User) -> None:
    looking, ruling = signed_in(owner), signed_in(admin)
    assert "kept for ever" in looking.get("/points/").content.decode()
    assert looking.post("/points/", {"ended_days": "1"}).status_code == 403
    preview = ruling.post("/points/", {"ended_days": "1", "action": "preview"}).content.decode()
    assert "of 1 run would be dropped" in preview
    assert not Retention.objects.exists()
    wrong = ruling.post("/points/", {"ended_days": "0"})
    assert wrong.status_code == 400
    assert "greater than or equal to 1" in wrong.content.decode()
    assert ruling.post("/points/", {"ended_days": "5", "superseded_days": ""}).status_code == 302
    assert (retention.setting().ended_days, retention.setting().superseded_days) == (5, None)
    retention.drop_all()
    assert "Dropped" in looking.get("/points/").content.decode()


def test_strangers_are_sent_away(db: None) -> None:
    assert Client().get("/points/").status_code == 302
