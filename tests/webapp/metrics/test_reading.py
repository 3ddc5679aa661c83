"""Reading series: compared with a brute-force reading of the same writes."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from django.test import Client
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.webapp.metrics.reference import check_rows, same
from trainer_core.spool import encode_number
from webapp.checkpoints.models import Checkpoint
from webapp.metrics import appending, charts, layout, reading, zoom
from webapp.metrics.appending import BLOCK_POINTS
from webapp.metrics.models import Series
from webapp.metrics.store import ship_spool
from webapp.runs.models import Attempt, Run

Written = list[tuple[int, float]]


def write(attempt: Attempt, points: Written, name: str = "loss", **others: float) -> None:
    """One line a point, shipped in pieces of uneven length; point i has time 1000 + i."""
    begin = attempt.spool_offset
    lines = [
        orjson.dumps(
            {"v": 1, "kind": "metrics", "t": 1000.0 + index, "step": step, "values": {name: encode_number(value), **others}}
        ) + b"\n"
        for index, (step, value) in enumerate(points)
    ]  # fmt: skip
    data = b"".join(lines)
    size = max(len(data) // 3, 1)
    while attempt.spool_offset < begin + len(data):
        start = attempt.spool_offset - begin
        ship_spool(attempt, attempt.spool_offset, data[start : start + max(size, len(max(lines, key=len)))])


def curve(answer: dict[str, Any], attempt: int | None = None, metric: str = "loss") -> dict[str, Any] | None:
    return next((item for item in answer["series"] if (item["metric"], item["attempt"]) == (metric, attempt)), None)


values = st.floats(allow_nan=True, allow_infinity=True, width=32)
writes = st.lists(st.tuples(st.integers(-50, 400), values), min_size=1, max_size=600)


@pytest.mark.parametrize("block_points,few_blocks,buckets", [(256, 32, 2000), (4, 0, 10)], ids=["points", "rollups"])
@hypothesis_settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(first=writes, second=st.lists(st.tuples(st.integers(0, 400), values), max_size=300))
def test_a_chart_equals_brute_force(
    run: Run,
    block_points: int,
    few_blocks: int,
    buckets: int,
    first: Written,
    second: Written,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of order, repeated, not finite, resumed: the last write of the newest attempt wins, the rest is superseded."""
    monkeypatch.setattr(appending, "BLOCK_POINTS", block_points)
    monkeypatch.setattr(zoom, "FEW_BLOCKS", few_blocks)
    run.attempts.all().delete()
    attempts = [Attempt.objects.create(run=run, number=1)]
    write(attempts[0], first)
    expected = dict(first)
    superseded: dict[int, float] = {}
    if second:
        attempts.append(Attempt.objects.create(run=run, number=2))
        write(attempts[1], second)
        start = min(step for step, _ in second)
        superseded = {step: value for step, value in expected.items() if step >= start}
        expected = {step: value for step, value in expected.items() if step < start} | dict(second)
    answer = charts.chart(run, ["loss"], buckets=buckets)
    found = curve(answer)
    assert found is not None
    check_rows(found, expected)
    if "count" not in found:
        assert found["step"].tolist() == sorted(expected)
        assert same(found["y"], [expected[step] for step in sorted(expected)])
        odd = {found["step"][index]: kinds for index, kinds in found["odd"]}
        assert odd == {step: [str(encode_number(v))] for step, v in expected.items() if not math.isfinite(v)}
    old = curve(answer, attempt=1)
    if old is None or not superseded:
        assert old is None
        assert not superseded
    else:
        check_rows(old, superseded)


def brute_buckets(points: dict[int, float], limit: int) -> list[tuple[int, float, float, float, int]]:
    """(last step, mean, low, high, count) of the smallest aligned power-of-two buckets that are few enough."""
    shift = 0
    while len({step >> shift for step in points}) > limit:
        shift += 1
    buckets: dict[int, list[int]] = {}
    for step in sorted(points):
        buckets.setdefault(step >> shift, []).append(step)
    rows = []
    for steps in buckets.values():
        finite = [points[step] for step in steps if math.isfinite(points[step])]
        mean = math.fsum(finite) / len(finite) if finite else math.nan
        rows.append((steps[-1], mean, min(finite, default=math.nan), max(finite, default=math.nan), len(steps)))
    return rows


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    points=st.dictionaries(st.integers(-(2**40), 2**40) | st.integers(0, 300), values, min_size=30, max_size=200),
    limit=st.integers(10, 60),
)
def test_buckets_equal_brute_force(points: dict[int, float], limit: int) -> None:
    steps = sorted(points)
    raw = np.zeros(len(steps), layout.POINT)
    raw["step"], raw["value"] = steps, [points[step] for step in steps]
    found = layout.bucketed(layout.as_rows(raw), limit)
    assert len(found) <= limit or len(points) <= limit
    if len(points) <= limit:
        assert found["step"].tolist() == steps
        return
    expected = brute_buckets(points, limit)
    assert found["step"].tolist() == [row[0] for row in expected]
    assert found["count"].tolist() == [row[4] for row in expected]
    np.testing.assert_array_equal(found["low"], [row[2] for row in expected])
    np.testing.assert_array_equal(found["high"], [row[3] for row in expected])
    np.testing.assert_allclose(found["mean"], [row[1] for row in expected], rtol=1e-9, atol=1e-9 * 3.5e38)


def test_buckets_stay_where_they_are_when_points_come(attempt: Attempt) -> None:
    """A live chart must not flicker: old buckets are the same after new points, while the bucket size is."""
    raw = np.zeros(2600, layout.POINT)
    raw["step"] = np.arange(2600)
    raw["value"] = np.sin(raw["step"])
    before = layout.bucketed(layout.as_rows(raw[:2500]), 2000)
    after = layout.bucketed(layout.as_rows(raw), 2000)
    np.testing.assert_array_equal(before[:-1], after[: len(before) - 1])


def test_a_spike_among_many_points_is_never_hidden(run: Run, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(step, 1000.0 if step == 12345 else -1000.0 if step == 77 else 0.5) for step in range(20_000)]
    write(attempt, points)
    for few_blocks in (1500, 0):
        monkeypatch.setattr(zoom, "FEW_BLOCKS", few_blocks)
        for buckets in (10, 100, 2000):
            found = curve(charts.chart(run, ["loss"], buckets=buckets))
            assert found is not None
            assert len(found["x"]) <= buckets
            assert found["points"] == 20_000
            assert (found["low"].min(), found["high"].max()) == (-1000.0, 1000.0)
    near = curve(charts.chart(run, ["loss"], low=12_300, high=12_400))
    assert near is not None
    assert near["step"].tolist() == list(range(12_300, 12_401))
    assert "count" not in near


def test_a_resume_from_a_checkpoint_takes_over_behind_it(run: Run, attempt: Attempt) -> None:
    write(attempt, [(step, 1.0) for step in range(1, 101)])
    checkpoint = Checkpoint.objects.create(
        run=run, attempt=attempt, step=50, kind="adapter", created_at=attempt.created_at
    )
    second = Attempt.objects.create(run=run, number=2, resumed_from=checkpoint)
    assert curve(charts.chart(run, ["loss"]), attempt=1) is None  # nothing is superseded before the new attempt reports
    write(second, [(step, 2.0) for step in range(51, 61)])
    answer = charts.chart(run, ["loss"])
    now, old = curve(answer), curve(answer, attempt=1)
    assert now is not None
    assert old is not None
    assert now["step"].tolist() == list(range(1, 61))
    assert now["y"].tolist() == [1.0] * 50 + [2.0] * 10
    assert old["step"].tolist() == list(range(51, 101))
    assert [(item["number"], item["step"]) for item in answer["attempts"]] == [(1, 1), (2, 51)]


def test_tokens_and_time_as_axis(run: Run, attempt: Attempt) -> None:
    write(attempt, [(1, 0.1), (2, 0.2), (4, 0.4)], **{charts.TOKENS: 100.0})
    by_tokens = curve(charts.chart(run, ["loss"], "tokens"))
    by_time = curve(charts.chart(run, ["loss"], "time"))
    assert by_tokens is not None
    assert by_time is not None
    assert by_tokens["x"].tolist() == [100.0, 200.0, 300.0]
    assert by_time["x"].tolist() == [1000.0, 1001.0, 1002.0]
    part = curve(charts.chart(run, ["loss"], "tokens", low=150, high=250))
    assert part is not None
    assert part["step"].tolist() == [2]
    part = curve(charts.chart(run, ["loss"], "time", low=1001, high=1002))
    assert part is not None
    assert part["step"].tolist() == [2, 4]


def test_what_is_new_comes_once_and_a_new_attempt_resets(run: Run, attempt: Attempt) -> None:
    write(attempt, [(step, float(step)) for step in range(BLOCK_POINTS + 5)])
    first = charts.chart(run, ["loss"])
    assert charts.delta(run, ["loss"], "step", first["cursor"])["series"] == []
    write(attempt, [(step, float(step)) for step in range(BLOCK_POINTS + 5, 2 * BLOCK_POINTS + 10)])
    answer = charts.delta(run, ["loss", "nothing"], "step", first["cursor"])
    found = curve(answer)
    assert found is not None
    assert found["step"].tolist() == list(range(BLOCK_POINTS + 5, 2 * BLOCK_POINTS + 10))
    assert charts.delta(run, ["loss"], "step", answer["cursor"])["series"] == []
    Attempt.objects.create(run=run, number=2)
    assert charts.delta(run, ["loss"], "step", answer["cursor"])["reset"]
    with pytest.raises(charts.BadCursor, match="pass on the one"):
        charts.delta(run, ["loss"], "step", "1.2.x")


def test_many_charts_take_few_queries(run: Run, attempt: Attempt, django_assert_max_num_queries: Callable) -> None:
    write(attempt, [(step, 1.0) for step in range(10)], **{f"m/{index}": 1.0 for index in range(60)})
    with django_assert_max_num_queries(130):
        charts.chart(run, [f"m/{index}" for index in range(60)])
    cursor = charts.cursor_of(run)
    write(attempt, [(10, 1.0)], **{f"m/{index}": 1.0 for index in range(60)})
    with django_assert_max_num_queries(6):
        answer = charts.delta(run, [f"m/{index}" for index in range(60)], "step", cursor)
    assert len(answer["series"]) == 60


@pytest.fixture
def browser(run: Run) -> Client:
    client = Client()
    client.force_login(run.owner)
    return client


def test_the_api_gives_any_name_and_says_what_is_odd(run: Run, attempt: Attempt, browser: Client) -> None:
    name = 'timing(s)/gen "it\'s" 100% <b>?#&;метрика θ→∞ ' + "x" * 200
    write(attempt, [(1, 1.0), (2, math.nan), (3, math.inf), (4, -math.inf)], name=name)
    answer = browser.get(f"/api/runs/{run.pk}/chart", {"metric": name}).json()
    series = answer["series"][0]
    assert series["metric"] == name
    assert series["y"] == [1.0, None, None, None]
    assert series["odd"] == [[1, ["nan"]], [2, ["inf"]], [3, ["-inf"]]]
    listed = browser.get(f"/api/runs/{run.pk}/metrics").json()
    assert (listed[0]["name"], listed[0]["last_kind"], listed[0]["points"]) == (name, "-inf", 4)


@pytest.mark.parametrize(
    "query,words",
    [
        ("", "metric"), ("metric=" + "x" * 300, "1 to 250"), ("metric=a&axis=epoch", "axis"), ("metric=a&after=9", "cursor"),
        ("metric=a&buckets=1", "buckets"), ("metric=a&from=nan", "from"), ("&".join(["metric=a"] * 101), "1 to 100"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_422(run: Run, browser: Client, query: str, words: str) -> None:
    answer = browser.get(f"/api/runs/{run.pk}/chart?{query}")
    assert answer.status_code == 422
    assert words in answer.json()["detail"]


def exported(client: Client, run: Run, **query: Any) -> bytes:
    answer = client.get(f"/api/runs/{run.pk}/metrics/export", query)
    assert answer.status_code == 200
    assert answer.headers["Content-Disposition"].startswith("attachment")
    return b"".join(answer)


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators")
@pytest.mark.django_db(transaction=True)  # under ASGI pieces are made in another thread, which sees committed rows only
def test_exports_are_complete(run: Run, attempt: Attempt, browser: Client, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    points = [(step, math.nan if step == 3 else math.inf if step == 4 else step / 7) for step in range(3000)]
    write(attempt, points, name='a "quoted", name', other=1.0)
    write(Attempt.objects.create(run=run, number=2), [(2990, 5.0)], name='a "quoted", name')
    rows = list(csv.DictReader(io.StringIO(exported(browser, run, metric='a "quoted", name').decode())))
    assert len(rows) == 3001
    assert [(int(row["step"]), str(float(row["value"]))) for row in rows[:-1]] == [(s, str(v)) for s, v in points]
    assert [int(row["superseded"]) for row in rows] == [0] * 2990 + [1] * 10 + [0]
    lines = [json.loads(line) for line in exported(browser, run, format="jsonl").splitlines()]
    assert len(lines) == 6001
    assert lines[3]["value"] == "nan"
    (tmp_path / "x.parquet").write_bytes(exported(browser, run, format="parquet"))
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.num_rows == 6001
    assert table.filter(np.array(table["metric"]) == "other")["value"].to_pylist() == [1.0] * 3000
    assert browser.get(f"/api/runs/{run.pk}/metrics/export", {"metric": "none"}).status_code == 404


def test_recent_points_reach_back_over_a_block(run: Run, attempt: Attempt) -> None:
    write(attempt, [(step, float(step)) for step in range(BLOCK_POINTS + 3)])
    found = reading.recent(run, ["loss", "nothing"], 20)
    assert found["loss"]["step"].tolist() == list(range(BLOCK_POINTS - 17, BLOCK_POINTS + 3))
    assert set(found) == {"loss"}
    assert Series.objects.get().blocks_written == 1
