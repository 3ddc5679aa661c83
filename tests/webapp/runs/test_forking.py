"""Forks: a new run that begins with a checkpoint's weights; what does not fit is refused with a sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from tests.webapp import seed
from trainer_core.spec import RunSpec
from webapp.accounts.models import ApiToken, User
from webapp.checkpoints.models import Checkpoint
from webapp.runs import forking, services
from webapp.runs.lifecycle import Refused
from webapp.runs.models import Run
from webapp.runs.sample import sample_spec

pytestmark = pytest.mark.django_db


@pytest.fixture
def checkpoint(ada: User) -> Checkpoint:
    run = seed.make_run(ada, "origin", state="completed", steps=20)
    return run.checkpoints.select_related("run").get(step=20)


def changed(spec: RunSpec, **sections: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate({**spec.model_dump(), **{name: {**spec.model_dump()[name], **values}
                                                           for name, values in sections.items()}})  # fmt: skip


def test_a_fork_has_its_own_copy_of_the_weights_and_nothing_of_the_optimizer(ada: User, checkpoint: Checkpoint) -> None:
    spec = changed(checkpoint.run.run_spec(), training={"learning_rate": 1e-5}, data={"size": 7})
    fork = services.create_run(spec, ada, checkpoint=checkpoint)
    assert (fork.parent, fork.forked_step) == (checkpoint.run, 20)
    names = sorted(path.name for path in fork.starting_weights.iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    copied = (fork.starting_weights / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(checkpoint.folder)
    services.delete_run(checkpoint.run, checkpoint.run.owner)
    assert (fork.starting_weights / "adapter_model.safetensors").read_bytes() == copied


@pytest.mark.parametrize(
    "sections, field, words",
    [
        ({"lora": {"r": 8}}, "lora.r", "The adapter of step 20 of origin has r 16; found 8"),
        ({"lora": {"target_modules": "q_proj"}}, "lora.target_modules", "has target_modules all-linear; found q_proj"),
        ({"lora": {"enabled": False}}, "lora.enabled", "Step 20 of origin is a LoRA adapter"),
        ({"model": {"path": "another/model"}}, "model.path", "keeps the model of step 20 of origin"),
    ],
)
def test_what_the_weights_do_not_fit_is_refused_with_a_sentence(
    ada: User, checkpoint: Checkpoint, sections: Any, field: str, words: str
) -> None:
    spec = changed(checkpoint.run.run_spec(), **sections)
    (problem,) = forking.problems(spec, checkpoint)
    assert problem.field == field
    assert words in problem.message
    with pytest.raises(Refused, match=r"(?i)step 20"):
        services.create_run(spec, ada, checkpoint=checkpoint)
    assert Run.objects.count() == 1


def test_full_weights_are_not_forked_into_an_adapter(ada: User, checkpoint: Checkpoint) -> None:
    Checkpoint.objects.update(kind="full")
    checkpoint.refresh_from_db()
    (problem,) = forking.problems(sample_spec(), checkpoint)
    assert (problem.field, "turn LoRA off" in problem.message) == ("lora.enabled", True)


def test_weights_that_are_gone_are_said(checkpoint: Checkpoint) -> None:
    shutil.rmtree(checkpoint.folder)
    (problem,) = forking.problems(checkpoint.run.run_spec(), checkpoint)
    assert (
        problem.message == "The weights of step 20 of origin are not on this machine, so nothing can begin with them."
    )


def form_of(spec: RunSpec, **more: str) -> dict[str, str]:
    from webapp.runs import forms

    form = forms.from_spec(spec)
    data = {
        field.path: field.value for section in form.sections for field in section.fields if field.kind != "checkbox"
    }
    data |= {field.path: "on" for section in form.sections for field in section.fields if field.value is True}
    for row in form.rewards:
        data |= {f"rewards.{row.index}.{key}": getattr(row, key) for key in ("name", "version", "weight")}
    return {**data, **more}


@pytest.fixture
def _model(settings: Any, tmp_path: Path) -> None:
    settings.MODELS_DIR = tmp_path


@pytest.mark.usefixtures("_model")
def test_the_form_of_a_fork_says_what_it_is_and_refuses_what_does_not_fit(
    as_ada: Client, checkpoint: Checkpoint
) -> None:
    run = checkpoint.run
    page = as_ada.get(f"/runs/new/?from={run.pk}&checkpoint={checkpoint.pk}").content.decode()
    assert "Fork of origin at step 20" in page
    assert "a new optimizer, and every prompt still to do" in page
    named = {"from": str(run.pk), "checkpoint": str(checkpoint.pk), "action": "draft"}
    refused = as_ada.post("/runs/new/", form_of(changed(run.run_spec(), lora={"r": 8}), **named))
    assert refused.status_code == 422
    assert "which would not fit it" in refused.content.decode()
    made = as_ada.post("/runs/new/", form_of(changed(run.run_spec(), training={"max_steps": 5}), **named))
    fork = Run.objects.get(parent=run)
    assert made.headers["Location"] == f"/runs/{fork.pk}/"
    assert fork.forked_step == 20
    edited = as_ada.post(f"/runs/{fork.pk}/edit/", form_of(changed(run.run_spec(), lora={"r": 8}), action="draft"))
    assert edited.status_code == 422
    assert "its model and LoRA settings stay as they are" in edited.content.decode()
    assert "forked at step 20 from" in as_ada.get(f"/runs/{fork.pk}/").content.decode()


def test_the_api_forks_from_the_newest_checkpoint_or_a_named_one(
    client: Client, ada: User, checkpoint: Checkpoint
) -> None:
    _, token = ApiToken.create(ada, "test")
    headers = {"Authorization": f"Bearer {token}"}
    address = f"/api/runs/{checkpoint.run_id}/fork"
    made = client.post(address, {}, content_type="application/json", headers=headers)
    assert made.status_code == 201, made.content
    assert (made.json()["forked_step"], made.json()["state"]) == (20, "draft")
    unknown = client.post(address, {"checkpoint": 10**9}, content_type="application/json", headers=headers)
    assert unknown.status_code == 404
    spec = changed(checkpoint.run.run_spec(), lora={"r": 4}).model_dump(mode="json")
    refused = client.post(address, {"spec": spec}, content_type="application/json", headers=headers)
    assert refused.status_code == 422
    assert refused.json()["problems"][0]["field"] == "lora.r"
