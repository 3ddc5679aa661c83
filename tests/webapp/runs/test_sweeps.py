"""Sweeps over any setting: every combination once, a choice by chance that can be repeated, and nothing half made."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import ApiToken, User
from webapp.runs import sweeps
from webapp.runs.models import Run
from webapp.runs.sample import sample_spec

AXES: dict[str, list[Any]] = {"training.learning_rate": [1e-4, 2e-4, 4e-4], "lora.r": [4, 8], "training.seed": [1, 2]}


def test_the_grid_has_every_combination_once() -> None:
    found = [tuple(place.values()) for place in sweeps.points(AXES, None, 0)]
    assert found == list(itertools.product(*AXES.values()))


def test_a_choice_by_chance_is_of_different_combinations_and_can_be_repeated() -> None:
    axes = {f"axis{index}": list(range(50)) for index in range(8)}  # far too many to list
    first, again, other = (sweeps.points(axes, 30, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({tuple(place.items()) for place in first}) == 30


@pytest.mark.parametrize("axes", [{}, {"lora.r": []}, {"training.seed": list(range(201))}])
def test_none_or_too_many_runs_are_refused(axes: dict[str, list[Any]]) -> None:
    with pytest.raises(ValueError, match="1 to 200 are allowed"):
        sweeps.points(axes, None, 0)


def test_each_run_is_named_and_tagged_and_a_wrong_value_is_said_with_its_place() -> None:
    made, problems = sweeps.specs(sample_spec(), sweeps.points(AXES, None, 0))
    assert problems == []
    assert made[0].name.endswith(": learning_rate=0.0001, r=4, seed=1")
    assert (made[-1].training.learning_rate, made[-1].lora.r, made[-1].training.seed) == (4e-4, 8, 2)
    assert len({spec.tags[-1] for spec in made}) == 1
    _, (problem,) = sweeps.specs(sample_spec(), [{"lora.r": 0}])
    assert problem.field == "lora.r"
    assert problem.message.startswith("r=0: ")
    _, (unknown,) = sweeps.specs(sample_spec(), [{"lora.rank": 3}])
    assert "no such setting to sweep" in unknown.message


@pytest.mark.django_db
def test_the_api_makes_all_or_nothing(client: Client, ada: User, settings: Any, tmp_path: Path) -> None:
    run = seed.make_run(ada, "base", state="completed", steps=0)
    _, token = ApiToken.create(ada, "test")

    def post(**body: Any) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        return client.post(f"/api/runs/{run.pk}/sweep", body, content_type="application/json", headers=headers)

    refused = post(axes={"training.learning_rate": [1e-4, -1]})
    assert refused.status_code == 422
    assert Run.objects.count() == 1
    made = post(axes={"training.learning_rate": [1e-4, 3e-4]}, launch=True)
    assert made.status_code == 201, made.content
    assert [item["state"] for item in made.json()] == ["queued", "queued"]
    assert [item["spec"]["training"]["learning_rate"] for item in made.json()] == [1e-4, 3e-4]
    assert all(item["parent"] == str(run.pk) for item in made.json())
