"""Models and datasets of the hub in the form: private ones with the owner's token, and what is in a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.test import Client

from tests.hub_stand_in import Hub, gsm8k, running_hub
from tests.webapp.runs.test_form import posted
from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.runs import checks, forms, hub, peeking, prelaunch
from webapp.secrets.services import store

pytestmark = pytest.mark.django_db
RENAMED = {"source": "openai/gsm8k", "config": "main", "rename_columns": {"question": "prompt"}}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a private model and a private dataset, for this process and for those it starts."""
    from huggingface_hub import constants

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with running_hub() as found:
        found.add("models", "acme/secret", model, private=True)
        found.add("datasets", "openai/gsm8k", gsm8k(tmp_path / "gsm8k"), private=True)
        for name, value in {"HF_ENDPOINT": found.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(peeking, "SECONDS", 300.0)  # other tests share the processor
        cache.clear()
        yield found
        cache.clear()


def spec(**sections: Any) -> RunSpec:
    return RunSpec.model_validate({"lora": {"r": 8}, **sections})


def problems(run: RunSpec, owner: User | None) -> list[tuple[str, str]]:
    return [(problem.field, problem.message) for problem in checks.check_spec(run, owner)]


def test_a_private_model_is_found_with_its_owners_token_only(there: Hub, ada: User, grace: User) -> None:
    store(ada, "HF_TOKEN", there.token)
    store(grace, "HF_TOKEN", "hf_of_grace_4567")
    named = spec(model={"path": "acme/secret"}, secrets=["HF_TOKEN"])
    assert problems(named, ada) == []
    assert problems(named, grace) == [
        ("model.path", "The hub has no model 'acme/secret' that the HF_TOKEN of grace may read.")
    ]
    (without,) = problems(spec(model={"path": "acme/secret"}), ada)
    assert "or it is private: then store a token that may read it under Secrets" in without[1]
    store(grace, "HF_TOKEN", there.token)  # another value is another question
    assert problems(named, grace) == []


def test_a_private_models_config_gives_its_memory(there: Hub, ada: User) -> None:
    store(ada, "HF_TOKEN", there.token)
    named = spec(model={"path": "acme/secret"}, secrets=["HF_TOKEN"])
    assert prelaunch.model_config(named, hub.access_of(named, None)) is None
    assert prelaunch.model_config(named, hub.access_of(named, ada)) == {"model_type": "llama"}


def test_a_secret_that_is_not_there_is_a_problem(ada: User) -> None:
    (problem,) = problems(spec(secrets=["HF_TOKEN"]), ada)
    assert problem[0] == "secrets"
    assert "There is no secret HF_TOKEN for the runs of ada" in problem[1]


def test_the_form_shows_columns_and_prompts_of_a_hub_dataset(there: Hub, as_ada: Client, ada: User) -> None:
    store(ada, "HF_TOKEN", there.token)
    run = spec(data=RENAMED, secrets=["HF_TOKEN"])
    answer = as_ada.post("/runs/check/", posted(forms.from_spec(run))).json()
    assert answer["problems"] == []
    assert "Columns of openai/gsm8k: question (as prompt), answer." in answer["facts"]
    assert "main train 0 + 0?" in answer["prompts"][0]["text"]
    asked = len(there.asked)
    assert as_ada.post("/runs/check/", posted(forms.from_spec(run))).json()["prompts"] == answer["prompts"]
    assert len(there.asked) == asked  # remembered


@pytest.mark.parametrize("changes, field, sentence", [
    ({"data": RENAMED | {"config": ""}}, "data.source", "Dataset 'openai/gsm8k' has several configurations: main, socratic"),
    ({"data": RENAMED | {"rename_columns": {}}}, "data.source", "has no 'prompt' column; found question, answer"),
    ({"data": RENAMED, "rewards": [{"name": "http_reward"}]}, "rewards", "needs the column 'reward_url'"),
    ({"data": RENAMED, "evaluation": {"every_steps": 5, "source": "openai/gsm8k", "split": "dev"}}, "evaluation.source",
     "Evaluation: dataset 'openai/gsm8k' has no split 'dev'; it has train, test"),
])  # fmt: skip
def test_what_is_wrong_inside_a_hub_dataset_is_told(
    there: Hub, ada: User, changes: dict[str, Any], field: str, sentence: str
) -> None:
    store(ada, "HF_TOKEN", there.token)
    (problem,) = problems(spec(secrets=["HF_TOKEN"], **changes), ada)
    assert problem[0] == field
    assert sentence in problem[1]


def test_a_dataset_that_is_slow_to_read_keeps_nobody_from_launching(
    there: Hub, ada: User, as_ada: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(ada, "HF_TOKEN", there.token)
    monkeypatch.setattr(peeking, "SECONDS", 0.01)
    answer = as_ada.post("/runs/check/", posted(forms.from_spec(spec(data=RENAMED, secrets=["HF_TOKEN"])))).json()
    assert answer["problems"] == []
    assert answer["prompts"] == []
    assert any(fact.startswith("Not looked at yet:") for fact in answer["facts"])
