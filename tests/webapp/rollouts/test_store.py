"""Shipping rollouts: the same care as for points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from trainer_core.spool import Spool
from webapp.accounts.models import User
from webapp.metrics.store import WrongOffset
from webapp.rollouts.models import StoredRollout
from webapp.rollouts.store import ship_rollouts
from webapp.runs.models import Attempt, Event, Run


@pytest.fixture
def attempt(ada: User) -> Attempt:
    return Attempt.objects.create(run=Run.objects.create(name="r", owner=ada, spec={}), number=1)


def rollout(**changes: Any) -> dict[str, Any]:
    return {
        "group_id": "g1",
        "row_index": 3,
        "reward": 0.5,
        "completion": [{"role": "assistant", "content": "ok"}],
        **changes,
    }


def test_rollouts_are_stored_as_reported(attempt: Attempt, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "rollouts.jsonl")
    spool.rollout(4, rollout())
    spool.rollout(5, rollout(reward=None))
    spool.rollout(5, rollout(reward="nan"))
    spool.event(5, "warning", "reward_error", "It raised.")
    data = (tmp_path / "rollouts.jsonl").read_bytes()
    assert ship_rollouts(attempt, 0, data) == attempt.rollouts_offset == len(data)
    found = list(StoredRollout.objects.values_list("step", "group_id", "row_index", "reward"))
    assert found == [(4, "g1", 3, 0.5), (5, "g1", 3, None), (5, "g1", 3, None)]
    assert StoredRollout.objects.first().data == rollout()  # type: ignore[union-attr]
    assert Event.objects.get().name == "reward_error"
    assert Attempt.objects.get().spool_offset == 0


def test_a_repeated_chunk_is_refused_and_a_torn_line_waits(attempt: Attempt) -> None:
    line = orjson.dumps({"v": 1, "kind": "rollout", "t": 1.0, "step": 1, "rollout": rollout()}) + b"\n"
    assert ship_rollouts(attempt, 0, line + line[:30]) == len(line)
    with pytest.raises(WrongOffset):
        ship_rollouts(attempt, 0, line)
    assert ship_rollouts(attempt, len(line), line) == 2 * len(line)
    assert StoredRollout.objects.count() == 2


@pytest.mark.parametrize(
    "wrong",
    [
        [], {"row_index": 1}, rollout(group_id=""), rollout(group_id="x" * 65), rollout(row_index=2**64),
        rollout(row_index="1"),
    ],
)  # fmt: skip
def test_a_rollout_that_is_wrong_becomes_a_warning(attempt: Attempt, wrong: Any) -> None:
    lines = [{"v": 1, "kind": "rollout", "t": 1.0, "step": 1, "rollout": item} for item in (wrong, rollout())]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert ship_rollouts(attempt, 0, data) == len(data)
    assert StoredRollout.objects.count() == 1
    assert Event.objects.get().name == "spool_malformed"


def test_text_with_nul_is_stored(attempt: Attempt) -> None:
    item = rollout(completion=[{"role": "assistant", "content": "a\0b"}])
    data = orjson.dumps({"v": 1, "kind": "rollout", "t": 1.0, "step": 1, "rollout": item}) + b"\n"
    ship_rollouts(attempt, 0, data)
    assert StoredRollout.objects.get().data["completion"][0]["content"] == "a\ufffdb"
