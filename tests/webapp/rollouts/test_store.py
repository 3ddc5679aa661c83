"""Shipping rollouts: the same care as for points."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from django.apps import apps

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


def trained(**changes: Any) -> dict[str, Any]:
    tokens = {
        "rollout_id": "r1", "sequence": 0, "advantage": 0.5, "left_out": 0, "text": ["4", "2", "!"], "mask": "t.o",
        "log_probs": [-0.1, -2.0], "ratio": [1.0, 9.0], "entropy": [0.2, 0.3],
    }  # fmt: skip
    return {"group_id": "g1", "staleness": 2, "rollouts": [{**tokens, **changes}]}


def line(kind: str, step: int, record: Any) -> bytes:
    return orjson.dumps({"v": 1, "kind": kind, "t": 1.0, "step": step, kind: record}) + b"\n"


def test_what_the_trainer_says_of_tokens_is_added_to_the_rollout(attempt: Attempt) -> None:
    first = line("rollout", 4, rollout(rollout_id="r1")) + line("rollout", 4, rollout(rollout_id="r2"))
    ship_rollouts(attempt, 0, first)
    later = line("trained", 6, trained())
    assert ship_rollouts(attempt, len(first), later) == len(first + later)
    assert list(StoredRollout.objects.values_list("rollout_id", "trained_step", "staleness")) == [
        ("r1", 6, 2), ("r2", 6, 2),
    ]  # fmt: skip
    tokens = StoredRollout.objects.get(rollout_id="r1").tokens.get()
    assert (tokens.sequence, tokens.data["mask"], tokens.data["ratio"]) == (0, "t.o", [1.0, 9.0])
    assert not Event.objects.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        [], {"group_id": "g1"}, {**trained(), "staleness": "2"}, {**trained(), "group_id": "unknown"}, trained(mask="t"),
        trained(ratio=[1.0]), trained(sequence=-1), trained(rollout_id=7), {**trained(), "rollouts": [[]]},
    ],
)  # fmt: skip
def test_what_the_trainer_says_wrongly_becomes_a_warning(attempt: Attempt, wrong: Any) -> None:
    data = line("rollout", 1, rollout(rollout_id="r1")) + line("trained", 2, wrong) + line("rollout", 3, rollout())
    assert ship_rollouts(attempt, 0, data) == len(data)
    assert StoredRollout.objects.filter(trained_step=None).count() == 2
    assert Event.objects.get().name == "spool_malformed"


def test_a_migration_makes_older_rollouts_searchable(attempt: Attempt) -> None:
    fill = importlib.import_module("webapp.rollouts.migrations.0002_tokens_and_search").fill
    ship_rollouts(attempt, 0, line("rollout", 1, rollout(rollout_id="r1", prompt="Wörter?")))
    StoredRollout.objects.update(rollout_id="", text="")
    fill(apps, None)
    assert StoredRollout.objects.values_list("rollout_id", "text").get() == ("r1", "wörter?\nok")
