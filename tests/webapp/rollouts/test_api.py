"""Rollouts through the API: found by words and reward, with their tokens."""

from __future__ import annotations

import pytest
from django.test import Client

from tests.webapp import seed
from tests.webapp.rollouts import examples
from webapp.accounts.models import ApiToken, User
from webapp.rollouts.models import StoredRollout
from webapp.runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, steps=4)


@pytest.fixture
def api(ada: User) -> Client:
    return Client(headers={"Authorization": f"Bearer {ApiToken.create(ada, 't')[1]}"})


def test_rollouts_are_found_by_words_and_reward(api: Client, run: Run) -> None:
    examples.add_conversation(run, 2)
    path = f"/api/runs/{run.pk}/rollouts"
    assert [item["data"]["rollout_id"] for item in api.get(path, {"search": "WEATHER kraków"}).json()] == ["talk-1"]
    assert api.get(path, {"search": "kraków", "max_reward": 0.5}).json()[0]["data"]["rollout_id"] == "talk-0"
    assert api.get(path, {"search": "kraków", "min_reward": 1.5}).json() == []
    assert api.get(path, {"min_reward": "nan"}).status_code == 422
    assert api.get(path, {"search": "\0"}).json() == []


def test_tokens_of_a_rollout_are_those_that_the_trainer_wrote(api: Client, ada: User, run: Run) -> None:
    examples.add_tokens(run, 3)
    rollout = StoredRollout.objects.filter(run=run, step=3).first()
    without = StoredRollout.objects.filter(run=run, step=0).first()
    assert rollout is not None
    assert without is not None
    path = f"/api/runs/{run.pk}/rollouts"
    (tokens,) = api.get(f"{path}/{rollout.pk}/tokens").json()
    assert tokens["text"][-2:] == ["<|im_end|>", "\nuser"]
    assert len(tokens["ratio"]) == sum(mark != "." for mark in tokens["mask"])
    assert api.get(f"{path}/{without.pk}/tokens").json() == []
    assert api.get(f"{path}/{rollout.pk + 999}/tokens").status_code == 404
    other = seed.make_run(ada, state="draft")
    assert api.get(f"/api/runs/{other.pk}/rollouts/{rollout.pk}/tokens").status_code == 404
    listed = next(item for item in api.get(path, {"step": 3}).json() if item["id"] == rollout.pk)
    assert (listed["trained_step"], listed["staleness"]) == (5, 1)
