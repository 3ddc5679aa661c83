"""A state machine: a run's reports are written, shipped, killed and read in any order, beside a plain Python model.

    python -m tests.webapp.metrics.machine EXAMPLES

Runs in a process of its own, on the database that OFFBEAT_HOME or DATABASE_URL names, which must be migrated: shipping is
killed for real, by SIGKILL in a forked process, before a statement or a commit that hypothesis chooses.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import django

django.setup()

import numpy as np  # noqa: E402
import orjson  # noqa: E402
import pytest  # noqa: E402
from django.db import connection  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test  # noqa: E402

from tests.webapp.metrics.reference import check_rows  # noqa: E402
from trainer_core.spool import encode_number  # noqa: E402
from webapp.accounts.models import User  # noqa: E402
from webapp.metrics import appending, charts, reading, zoom  # noqa: E402
from webapp.metrics import points as saving  # noqa: E402
from webapp.metrics.store import WrongOffset, ship_spool  # noqa: E402
from webapp.runs.models import Attempt, Run  # noqa: E402

# Small blocks and packs, so that a few hundred points reach every level of rollups.
appending.BLOCK_POINTS = 4
appending.FAN = zoom.FAN = 4
appending.PACK_ROWS = zoom.PACK_ROWS = 16
zoom.FEW_BLOCKS = 0

NAMES = ("loss", "rewards/é θ")
numbers = st.sampled_from([0.0, 1.0, -2.5, 1e300, math.nan, math.inf, -math.inf]) | st.floats(width=32)
Point = tuple[int, float, float]


class Reports:
    """An attempt: the text of its spool, and the points in it by the byte where their line ends."""

    def __init__(self, run: Run, number: int) -> None:
        self.attempt = Attempt.objects.create(run=run, number=number)
        self.text = b""
        self.torn = b""
        self.points: list[tuple[int, str, Point]] = []
        self.next_step = 0

    def write(self, steps: list[int], values: list[float], names: list[str], tear: int) -> None:
        self.text += self.torn
        self.torn = b""
        for step, value in zip(steps, values, strict=True):
            time = 1e9 + len(self.points)
            shown = {name: encode_number(value) for name in names}
            line = orjson.dumps({"v": 1, "kind": "metrics", "t": time, "step": step, "values": shown}) + b"\n"
            self.text += line
            self.points += [(len(self.text), name, (step, time, value)) for name in names]
            self.next_step = max(self.next_step, step + 1)
        if tear:
            self.torn, self.text = self.text[-tear:], self.text[:-tear]

    def stored(self, name: str) -> list[Point]:
        offset = Attempt.objects.values_list("spool_offset", flat=True).get(pk=self.attempt.pk)
        return [point for end, own, point in self.points if own == name and end <= offset]


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        owner = User.objects.get_or_create(username="machine")[0]
        self.run = Run.objects.create(name="machine", owner=owner, spec={})
        self.reports = [Reports(self.run, 1)]
        self.cursor = charts.cursor_of(self.run)
        self.seen: dict[str, dict[int, float]] = {name: {} for name in NAMES}

    @rule(
        count=st.integers(1, 120), order=st.sampled_from(["on", "gaps", "back", "same", "any"]),
        names=st.sampled_from([NAMES[:1], NAMES[1:], NAMES]), tear=st.integers(0, 30), data=st.data(),
    )  # fmt: skip
    def write(self, count: int, order: str, names: tuple[str, ...], tear: int, data: st.DataObject) -> None:
        report = self.reports[-1]
        begin = report.next_step
        steps = {
            "on": range(begin, begin + count), "gaps": range(begin, begin + 7 * count, 7),
            "back": range(begin + count, begin, -1), "same": [begin + index // 5 for index in range(count)],
        }.get(order)  # fmt: skip
        if steps is None:
            steps = data.draw(st.lists(st.integers(-20, begin + 20), min_size=count, max_size=count))
        spikes = data.draw(st.lists(numbers, min_size=1, max_size=8))
        values = [spikes[index % len(spikes)] if index % 9 == 0 else float(index % 5) for index in range(count)]
        report.write(list(steps), values, list(names), tear)

    @rule()
    def resume(self) -> None:
        """What the attempt has not written down yet is lost with its process; a new one begins a little behind."""
        if len(self.reports) < 4:
            fresh = Reports(self.run, len(self.reports) + 1)
            fresh.next_step = max(0, self.reports[-1].next_step - 10)
            self.reports.append(fresh)

    @rule(which=st.integers(0, 3), size=st.integers(200, 20_000))
    def ship(self, which: int, size: int) -> None:
        report = self.reports[which % len(self.reports)]
        report.attempt.refresh_from_db()
        at = report.attempt.spool_offset
        ship_spool(report.attempt, at, report.text[at : at + size])

    @rule(which=st.integers(0, 3), statement=st.integers(0, 15) | st.integers(0, 150))
    def ship_and_be_killed(self, which: int, statement: int) -> None:
        """The process dies before the given statement or commit, or right after all of them."""
        report = self.reports[which % len(self.reports)]
        report.attempt.refresh_from_db()
        connection.close()
        child = os.fork()
        if child == 0:
            die_at(statement)
            ship_spool(report.attempt, report.attempt.spool_offset, report.text[report.attempt.spool_offset :])
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    @rule(which=st.integers(0, 3), data=st.data())
    def ship_again(self, which: int, data: st.DataObject) -> None:
        """A piece that was shipped before, or one after a gap, is refused whole."""
        report = self.reports[which % len(self.reports)]
        report.attempt.refresh_from_db()
        at = report.attempt.spool_offset
        wrong = data.draw(st.integers(0, len(report.text) + 5).filter(lambda offset: offset != at))
        with pytest.raises(WrongOffset) as refusal:
            ship_spool(report.attempt, wrong, report.text[wrong:] or b"x\n")
        assert refusal.value.expected == at

    @rule(
        zoom_=st.none() | st.tuples(st.integers(-20, 900), st.integers(0, 300)), buckets=st.sampled_from([10, 40, 2000])
    )
    def look(self, zoom_: tuple[int, int] | None, buckets: int) -> None:
        low, high = (None, None) if zoom_ is None else (zoom_[0], zoom_[0] + zoom_[1])
        answer = charts.chart(self.run, NAMES, low=low, high=high, buckets=buckets)
        found = {(item["metric"], item["attempt"]): item for item in answer["series"]}
        for name in NAMES:
            for attempt, points in self.expected(name).items():
                inside = {
                    step: value for step, value in points.items() if low is None or high is None or low <= step <= high
                }
                item = found.pop((name, attempt), None)
                assert (item is not None) == bool(inside), (name, attempt, inside)
                if item is not None:
                    assert len(item["step"]) <= buckets
                    check_rows(item, inside)
        assert not found

    def expected(self, name: str) -> dict[int | None, dict[int, float]]:
        """The run's own curve under None, and under an attempt's number what a newer one superseded."""
        starts = {}
        for report in self.reports:
            everything = [point for own in NAMES for point in report.stored(own)]
            if everything:
                starts[report.attempt.number] = min(point[0] for point in everything)
        curve: dict[int, float] = {}
        answer: dict[int | None, dict[int, float]] = {}
        for report in self.reports:
            number = report.attempt.number
            own = {step: value for step, _, value in report.stored(name)}
            end = min((start for other, start in starts.items() if other > number), default=math.inf)
            curve |= {step: value for step, value in own.items() if step < end}
            if old := {step: value for step, value in own.items() if step >= end}:
                answer[number] = old
        return {None: curve, **answer}

    @invariant()
    def everything_is_there_once(self) -> None:
        for report in self.reports:
            for name in NAMES:
                series = report.attempt.series.filter(name=name).first()
                pieces = list(reading.stream_points(series)) if series else []
                found = np.concatenate(pieces)[["step", "time", "value"]].tolist() if pieces else []
                assert repr(found) == repr(report.stored(name))

    @rule()
    def poll(self) -> None:
        """A live chart that asks for what is new has, all in all, what it would get if it asked anew."""
        answer = charts.delta(self.run, NAMES, "step", self.cursor)
        newest = self.reports[-1]
        if answer["reset"]:
            self.seen = {name: {step: value for step, _, value in newest.stored(name)} for name in NAMES}
        for item in answer["series"]:
            odd = {index: float(kinds[0]) for index, kinds in item["odd"]}
            for index, step in enumerate(item["step"].tolist()):
                self.seen[item["metric"]][step] = odd.get(index, float(item["y"][index]))
        self.cursor = answer["cursor"]
        for name in NAMES:
            expected = {step: value for step, _, value in newest.stored(name)}
            assert self.seen[name].keys() == expected.keys()
            assert all(
                repr(self.seen[name][step]) == repr(value) or math.isclose(self.seen[name][step], value, rel_tol=1e-6)
                for step, value in expected.items()
            )

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.delete()


def die_at(statement: int) -> None:
    """Kill this process before its `statement`-th statement, row of one, or commit from now on."""
    left = statement

    def count() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def before_statement(execute: Any, *arguments: Any) -> Any:
        count()
        return execute(*arguments)

    commit = connection._commit  # type: ignore[attr-defined]

    def before_commit() -> None:
        count()
        commit()

    def before_each(statement: str, rows: Iterable[Any]) -> None:
        execute_many(statement, (row for row in rows if count() is None))

    execute_many = saving.execute_many
    saving.execute_many = before_each
    connection.execute_wrappers.append(before_statement)
    connection._commit = before_commit  # type: ignore[attr-defined]


if __name__ == "__main__":
    examples = int(sys.argv[1])
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    print(f"{examples} examples")
