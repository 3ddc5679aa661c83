"""The list of runs: right, and in a fixed number of queries for ten thousand of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import pytest

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.runs.models import Run, State
from webapp.runs.queries import RunFilter, list_runs


def make(owner: User, count: int) -> None:
    spec = RunSpec().model_dump(mode="json")
    Run.objects.bulk_create(
        [
            Run(
                id=uuid.UUID(int=index), name=f"run {index}", owner=owner,
                state=State.RUNNING if index % 10 == 0 else State.COMPLETED,
                spec={**spec, "model": {"path": f"model-{index % 7}"}, "notes": "наука" if index == 5 else ""},
                tags=[f"tag{index % 3}", "größe"], archived=index % 50 == 49,
                summary={"reward": index / 1000, "step": index % 100} if index % 4 else {"reward_kind": "nan"},
            )
            for index in range(count)
        ],
        batch_size=200,
    )  # fmt: skip


PAGE_S = 0.1
"""Of processor time, for the newest runs of ten thousand: a busy machine must not fail it."""


def test_ten_thousand_runs_take_three_queries(ada: User, django_assert_num_queries: Callable) -> None:
    make(ada, 10_000)
    used = []
    for wanted, queries in (
        (RunFilter(), 2), (RunFilter(), 2), (RunFilter(), 2),
        (RunFilter(states=("live",), search="run model-3 tag1", sort="-reward", page=2, per_page=20), 3),
    ):  # fmt: skip
        began = time.process_time()
        with django_assert_num_queries(queries):
            page = list_runs(wanted)
            for run in page.runs:  # what a row shows must not ask again
                assert run.owner.username == "ada"
                assert run.model.startswith("model-")  # type: ignore[attr-defined]
                assert run.summary is not None
        used.append(time.process_time() - began)
    assert min(used[:3]) < PAGE_S
    whole, archived = list_runs(RunFilter()), list_runs(RunFilter(archived=True))
    assert (whole.total, archived.total) == (9800, 200)
    assert whole.states == {"running": 1000, "completed": 8800}
    assert archived.states == {"completed": 200}


@pytest.fixture
def some(ada: User) -> None:
    make(ada, 60)


def names(wanted: RunFilter) -> list[str]:
    return [run.name for run in list_runs(wanted).runs]


@pytest.mark.usefixtures("some")
def test_filters() -> None:
    assert names(RunFilter(states=("live",), sort="name")) == [
        "run 0",
        "run 10",
        "run 20",
        "run 30",
        "run 40",
        "run 50",
    ]
    assert names(RunFilter(archived=True)) == ["run 49"]
    assert (
        names(RunFilter(search="RUN 7")) == ["run 7", "run 17"][::-1] or names(RunFilter(search="run model-6 7")) != []
    )
    assert names(RunFilter(search="наука")) == ["run 5"]
    assert len(names(RunFilter(search="größe", per_page=100))) == 59
    assert len(names(RunFilter(tag="größe", per_page=100))) == 59
    assert names(RunFilter(tag="größ")) == []
    assert len(names(RunFilter(tag="tag1"))) == 19
    assert names(RunFilter(owner="nobody")) == []
    assert names(RunFilter(search=str(uuid.UUID(int=42)))) == ["run 42"]
    assert names(RunFilter(search="100%_")) == []


@pytest.mark.usefixtures("some")
def test_runs_without_a_value_come_last_either_way() -> None:
    without = {f"run {index}" for index in range(0, 60, 4)}
    up, down = names(RunFilter(sort="reward", per_page=100)), names(RunFilter(sort="-reward", per_page=100))
    assert set(up[-len(without) :]) == set(down[-len(without) :]) == without
    assert up[0] == "run 1"
    assert down[0] == "run 59"


def test_pages(ada: User) -> None:
    assert list_runs(RunFilter()).pages == 1
    make(ada, 60)
    seen = [name for page in (1, 2, 3) for name in names(RunFilter(sort="name", page=page, per_page=25))]
    assert len(seen) == len(set(seen)) == 59
    assert names(RunFilter(page=99)) == []


@pytest.mark.parametrize(
    "wrong", [{"states": ("nonsense",)}, {"sort": "password"}, {"page": 0}, {"per_page": 10_000}, {"per_page": 0}]
)
def test_what_is_not_allowed_is_said(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"There is no state|can't be sorted|A page holds"):
        RunFilter(**wrong)
