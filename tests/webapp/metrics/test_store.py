"""Shipping a spool: nothing lost, nothing doubled, whatever the file holds."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_core.spool import Spool
from webapp.metrics.appending import BLOCK_POINTS
from webapp.metrics.layout import STORED_ROW
from webapp.metrics.lines import MAX_LINE_BYTES
from webapp.metrics.models import Block, Pack, PointKind, Series
from webapp.metrics.store import WrongOffset, ship_spool
from webapp.rollouts.store import ship_rollouts
from webapp.runs.models import Attempt, Event, Run


def stored(name: str, attempt: Attempt) -> list[tuple[int, float]]:
    """(step, value) as written, decoded by hand: an independent reading of the layout."""
    series = Series.objects.get(attempt=attempt, name=name)
    pieces = [bytes(block.data) for block in series.blocks.order_by("number")] + [bytes(series.tail)]
    return [point for piece in pieces if piece for point in by_hand(piece)]


def by_hand(data: bytes) -> Iterator[tuple[int, float]]:
    widths = data[1:4]
    (count,) = struct.unpack_from("<I", data, 8)
    (step,) = struct.unpack_from("<q", data, 12)
    values = data[36 + sum(widths) * (count - 1) :]
    for index in range(count):
        at = 36 + widths[0] * (index - 1)
        if index:
            step = (step + int.from_bytes(data[at : at + widths[0]], "little", signed=True) + 2**63) % 2**64 - 2**63
        yield step, struct.unpack_from("<f" if data[4] == 4 else "<d", values, data[4] * index)[0]


def test_points_events_and_summary_are_stored(
    spool: Spool, ship: Callable[[], int], attempt: Attempt, tmp_path: Path
) -> None:
    spool.event(0, "info", "started", "The trainer started.", pid=7)
    spool.metrics(1, {"reward": 0.25, "loss": -0.5, "perf/forwarded_tok_s_wall_clock": 800.0})
    spool.metrics(2, {"reward": 0.5, "loss": -0.25, "sample/staleness_mean": 1.5})
    assert ship() == (tmp_path / "spool.jsonl").stat().st_size
    assert stored("reward", attempt) == [(1, 0.25), (2, 0.5)]
    assert stored("loss", attempt) == [(1, -0.5), (2, -0.25)]
    event = Event.objects.get()
    assert (event.name, event.text, event.data, event.step) == ("started", "The trainer started.", {"pid": 7}, 0)
    summary = Run.objects.get().summary
    assert summary["step"] == 2
    assert summary["reward"] == 0.5
    assert summary["tok_s"] == 800.0
    assert summary["staleness"] == 1.5
    assert summary["max_steps"] == 200
    attempt.refresh_from_db()
    assert attempt.spool_offset == (tmp_path / "spool.jsonl").stat().st_size


def test_values_that_are_not_finite_are_kept_apart(spool: Spool, ship: Callable[[], int], attempt: Attempt) -> None:
    spool.metrics(1, {"reward": math.nan, "loss": math.inf, "kl": -math.inf, "ratio": 1.0})
    ship()
    assert math.isnan(stored("reward", attempt)[0][1])
    assert stored("loss", attempt) == [(1, math.inf)]
    assert stored("kl", attempt) == [(1, -math.inf)]
    kinds = dict(Series.objects.values_list("name", "last_kind"))
    assert kinds == {
        "reward": PointKind.NAN, "loss": PointKind.POSITIVE_INFINITY, "kl": PointKind.NEGATIVE_INFINITY, "ratio": 0,
    }  # fmt: skip
    summary = Run.objects.get().summary
    assert "reward" not in summary
    assert summary["reward_kind"] == "nan"


def test_a_torn_line_stays_for_the_next_call(attempt: Attempt) -> None:
    line = orjson.dumps({"v": 1, "kind": "metrics", "t": 5.0, "step": 1, "values": {"loss": 1.0}}) + b"\n"
    data = line + line.replace(b'"step":1', b'"step":2')
    for cut in range(len(line), len(data)):
        fresh = Attempt.objects.create(run=attempt.run, number=cut)
        assert ship_spool(fresh, 0, data[:cut]) == len(line)
        assert ship_spool(fresh, len(line), data[len(line) :]) == len(data)
        assert stored("loss", fresh) == [(1, 1.0), (2, 1.0)]


def test_a_repeated_chunk_is_refused_and_writes_nothing(spool: Spool, attempt: Attempt, tmp_path: Path) -> None:
    spool.metrics(1, {"loss": 1.0})
    spool.event(1, "info", "first_step", "First step.")
    data = (tmp_path / "spool.jsonl").read_bytes()
    ship_spool(attempt, 0, data)
    with pytest.raises(WrongOffset, match=f"{len(data)} bytes are stored") as refusal:
        ship_spool(attempt, 0, data)
    assert refusal.value.expected == len(data)
    with pytest.raises(WrongOffset):
        ship_spool(attempt, len(data) + 1, data)
    assert stored("loss", attempt) == [(1, 1.0)]
    assert Event.objects.count() == 1


def test_a_failure_in_the_middle_writes_nothing(
    spool: Spool, attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.metrics(1, {"loss": 1.0})
    data = (tmp_path / "spool.jsonl").read_bytes()
    monkeypatch.setattr("webapp.metrics.store.write_events", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ship_spool(attempt, 0, data)
    monkeypatch.undo()
    assert Series.objects.count() == 0
    assert Attempt.objects.get().spool_offset == attempt.spool_offset == 0
    assert ship_spool(attempt, 0, data) == len(data)


@pytest.mark.parametrize(
    "line,reason",
    [
        (b"not json", "not JSON"),
        (b"[]", "an object is expected"),
        (b"{}", "version is None"),
        (b'{"v":2,"kind":"metrics","t":1,"step":1,"values":{}}', "version is 2; 1 is understood"),
        (b'{"v":1,"kind":"metrics","t":1,"step":1.5,"values":{}}', "step is 1.5"),
        (b'{"v":1,"kind":"metrics","t":1,"step":true,"values":{}}', "step is True"),
        (b'{"v":1,"kind":"metrics","t":1,"step":18446744073709551615,"values":{}}', "64-bit integer"),
        (b'{"v":1,"kind":"metrics","t":"now","step":1,"values":{}}', "Unix seconds"),
        (b'{"v":1,"kind":"metrics","t":1e300,"step":1,"values":{}}', "Unix seconds"),
        (b'{"v":1,"kind":"metrics","t":1,"step":1,"values":[1]}', "an object of numbers"),
        (b'{"v":1,"kind":"metrics","t":1,"step":1,"values":{"a":null}}', "a is None; a number"),
        (b'{"v":1,"kind":"metrics","t":1,"step":1,"values":{"a":NaN}}', "not JSON"),
        (b'{"v":1,"kind":"metrics","t":1,"step":1,"values":{"":1}}', "no metric name"),
        (b'{"v":1,"kind":"metrics","t":1,"step":1,"values":{"a\\u0000b":1}}', "no metric name"),
        (b'{"v":1,"kind":"metrics","t":1,"step":1,"values":{"' + b"x" * 251 + b'":1}}', "up to 250"),
        (b'{"v":1,"kind":"event","t":1,"step":1,"level":"loud","name":"a","text":"b"}', "info, warning, error"),
        (b'{"v":1,"kind":"event","t":1,"step":1,"level":"info","text":"b"}', "needs a name"),
        (b'{"v":1,"kind":"gossip","t":1,"step":1}', "kind is 'gossip'"),
        (b'{"v":1,"kind":"rollout","t":1,"step":1,"rollout":{"group_id":"g","row_index":1}}', "rollouts.jsonl"),
        (b'{"v":1,"kind":"metrics","t":-1,"step":1,"values":{}}', "Unix seconds"),
        (b'{"v":1,"kind":"event","t":1,"step":-1,"level":"info","name":"checkpoint","text":"b"}', "0 or more"),
        (
            b'{"v":1,"kind":"event","t":1,"step":1,"level":"info","name":"a","text":"b","data":{"x":'
            + b"[" * 900
            + b"]" * 900
            + b"}}",
            "nested deeper than 50",
        ),
        (b"\x00" * 40, "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_line_that_is_wrong_becomes_one_warning(attempt: Attempt, line: bytes, reason: str) -> None:
    good = b'{"v":1,"kind":"metrics","t":1,"step":3,"values":{"loss":2}}\n'
    data = good + line + b"\n" + good.replace(b":3", b":4")
    assert ship_spool(attempt, 0, data) == len(data)
    assert stored("loss", attempt) == [(3, 2.0), (4, 2.0)]
    event = Event.objects.get()
    assert (event.level, event.name) == ("warning", "spool_malformed")
    assert reason in event.text
    assert f"at byte {len(good)}" in event.text


def test_many_wrong_lines_are_one_warning(attempt: Attempt) -> None:
    ship_spool(attempt, 0, b"nonsense\n" * 5000)
    assert Event.objects.get().data["count"] == 5000


def test_a_line_without_end_is_given_up(attempt: Attempt) -> None:
    endless = b"x" * MAX_LINE_BYTES
    assert ship_spool(attempt, 0, endless[:-1]) == 0
    assert ship_spool(attempt, 0, endless) == MAX_LINE_BYTES
    assert "longer than" in Event.objects.get().text


def test_names_may_hold_slashes_quotes_and_any_script(spool: Spool, ship: Callable[[], int], attempt: Attempt) -> None:
    names = ["rewards/a/b", "timing(s)/gen", "pass@k", 'it\'s "quoted" 100%s {0} ?#&', "метрика/θ→∞ 日本語", "é" * 250]
    spool.metrics(1, {name: float(index) for index, name in enumerate(names)})
    ship()
    assert set(Series.objects.values_list("name", flat=True)) == set(names)
    assert stored(names[3], attempt) == [(1, 3.0)]
    assert not Event.objects.exists()


def test_more_names_than_an_sql_statement_takes_parameters(
    spool: Spool, ship: Callable[[], int], attempt: Attempt
) -> None:
    values = {f"m/{index}": float(index) for index in range(3000)}
    spool.metrics(1, values)
    ship()
    spool.metrics(2, values)
    ship()
    assert Series.objects.count() == 3000
    assert stored("m/2999", attempt) == [(1, 2999.0), (2, 2999.0)]


def test_full_tails_become_blocks(spool: Spool, ship: Callable[[], int], attempt: Attempt) -> None:
    expected = []
    for step in range(3 * BLOCK_POINTS + 10):
        value = math.nan if step == 5 else math.inf if step == 300 else math.sin(step)
        spool.metrics(step, {"loss": value})
        expected.append((step, value))
        if step % 100 == 0:
            ship()
    ship()
    assert str(stored("loss", attempt)) == str(expected)
    blocks = list(Block.objects.order_by("number"))
    assert [block.number for block in blocks] == [0, 1, 2]
    rows = np.frombuffer(bytes(Pack.objects.get().data), STORED_ROW)
    assert rows["kinds"].tolist() == [0b0011, 0b0101, 0b0001]
    finite = [value for _, value in expected[:BLOCK_POINTS] if math.isfinite(value)]
    assert (rows["low"][0], rows["high"][0], rows["finite"][0]) == (min(finite), max(finite), BLOCK_POINTS - 1)
    assert rows["mean"][0] == pytest.approx(math.fsum(finite) / len(finite))
    assert all(block.late == 0 for block in blocks)
    series = Series.objects.get()
    assert (series.points, series.first_step, series.last_step) == (len(expected), 0, len(expected) - 1)


def test_points_behind_earlier_blocks_are_counted_as_late(
    spool: Spool, ship: Callable[[], int], attempt: Attempt
) -> None:
    for step in [*range(BLOCK_POINTS), 7, *range(BLOCK_POINTS, 2 * BLOCK_POINTS), *range(BLOCK_POINTS + 1)]:
        spool.metrics(step, {"loss": 1.0})
    ship()
    assert list(Block.objects.order_by("number").values_list("late", flat=True)) == [0, 1, BLOCK_POINTS - 1]
    assert Series.objects.get().late_points == BLOCK_POINTS


def test_a_step_reported_several_times_is_not_cut_in_two(
    spool: Spool, ship: Callable[[], int], attempt: Attempt
) -> None:
    """As system metrics are: otherwise each block would hold late points of the step the block before ended with."""
    for line in range(4 * BLOCK_POINTS):
        spool.metrics(line // 3, {"system/cpu": float(line)})
    ship()
    assert Series.objects.get().blocks_written == 4
    assert Series.objects.get().late_points == 0


def test_checkpoints_get_the_reward_of_their_time(
    spool: Spool, ship: Callable[[], int], attempt: Attempt, run: Run
) -> None:
    spool.metrics(9, {"reward": 0.1})
    ship()
    spool.metrics(10, {"reward": 0.2})
    spool.event(10, "info", "checkpoint", "Saved.", path="x", size_bytes=123, kind="adapter")
    spool.metrics(11, {"reward": 0.3})
    ship()
    spool.event(11, "info", "checkpoint", "Saved.", path="x", size_bytes=124, kind="full")
    ship()
    rows = list(run.checkpoints.order_by("step").values_list("step", "kind", "size_bytes", "reward"))
    assert rows == [(10, "adapter", 123, 0.2), (11, "full", 124, 0.3)]


def test_a_checkpoint_saved_again_by_a_resumed_attempt_replaces_the_old_one(
    spool: Spool, ship: Callable[..., int], run: Run, tmp_path: Path, attempt: Attempt
) -> None:
    spool.event(10, "info", "checkpoint", "Saved.", path="x", size_bytes=1, kind="adapter")
    ship()
    second = Attempt.objects.create(run=run, number=2)
    again = Spool(tmp_path / "second.jsonl")
    again.event(10, "info", "checkpoint", "Saved.", path="x", size_bytes=2, kind="adapter")
    ship(second, tmp_path / "second.jsonl")
    assert run.checkpoints.filter(deleted_at=None).get().attempt == second
    assert run.checkpoints.count() == 2


def test_an_old_attempt_that_reports_late_leaves_the_summary(
    spool: Spool, ship: Callable[[], int], run: Run, attempt: Attempt
) -> None:
    Attempt.objects.create(run=run, number=2)
    spool.metrics(50, {"reward": 0.9})
    ship()
    run.refresh_from_db()
    assert run.summary == {}
    assert stored("reward", attempt) == [(50, 0.9)]


def test_queries_do_not_grow_with_points(
    spool: Spool, ship: Callable[[], int], attempt: Attempt, django_assert_max_num_queries: Callable
) -> None:
    for step in range(200):
        spool.metrics(step, {f"m/{index}": 1.0 for index in range(60)} | {"reward": 1.0})
    with django_assert_max_num_queries(14):
        ship()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
records = st.fixed_dictionaries(
    {},
    optional={
        "v": st.just(1) | json_values, "kind": st.sampled_from(["metrics", "event", "rollout"]) | json_values,
        "t": st.just(1.7e9) | json_values, "step": st.integers(-5, 5) | json_values,
        "values": st.dictionaries(st.text(max_size=260), st.floats() | json_values, max_size=3) | json_values,
        "level": st.sampled_from(["info", "error"]) | json_values, "name": st.just("checkpoint") | json_values,
        "text": st.just("x") | json_values, "data": st.just({"kind": "full", "size_bytes": 3}) | json_values,
        "rollout": st.just({"group_id": "g", "row_index": 1, "reward": 0.5}) | json_values,
    },
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(records, max_size=5), raw=st.binary(max_size=30))
def test_nothing_that_a_file_holds_stops_shipping(run: Run, lines: list[object], raw: bytes) -> None:
    """Whatever is in the way, the good line behind it arrives, and the offset moves on."""
    attempt = Attempt.objects.create(run=run, number=Attempt.objects.count() + 1)
    good = orjson.dumps({"v": 1, "kind": "metrics", "t": 1.0, "step": 7, "values": {"arrived": 1.0}}) + b"\n"
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + raw + b"\n" + good
    assert ship_spool(attempt, 0, data) == len(data)
    assert (7, 1.0) in stored("arrived", attempt)
    assert ship_rollouts(attempt, 0, data) == len(data)
