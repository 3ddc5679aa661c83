"""The new-run form says what RunSpec says, and gives back the spec that was typed into it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.rewards.forms import STARTER
from webapp.rewards.services import create_function
from webapp.runs import forms, services
from webapp.runs.models import Run, State
from webapp.runs.sample import sample_spec

TEXT = st.text(st.characters(categories=("L", "N", "P", "S", "Zs"), exclude_characters=","), max_size=40)


def posted(form: forms.SpecForm) -> dict[str, str]:
    """What a browser sends for an untouched form."""
    data: dict[str, str] = {}
    for section in form.sections:
        for field in section.fields:
            if field.kind != "checkbox":
                data[field.path] = field.value
            elif field.value:
                data[field.path] = "on"
    for row in form.rewards:
        data |= {f"rewards.{row.index}.{name}": getattr(row, name) for name in ("name", "version", "weight")}
    return data


@settings(deadline=None)
@given(
    name=TEXT.filter(str.strip), notes=TEXT, tags=st.lists(TEXT.map(str.strip).filter(bool), max_size=3),
    rate=st.floats(1e-9, 1), temperature=st.floats(0.01, 10), steps=st.integers(1, 10**7), lora=st.booleans(),
    budget=st.none() | st.integers(-1, 10**6).filter(lambda n: n > 0), weight=st.floats(-1e6, 1e6),
    options=st.dictionaries(TEXT.filter(bool), st.integers() | st.booleans() | TEXT, max_size=3),
)  # fmt: skip
def test_a_spec_survives_the_form(name: str, notes: str, tags: list[str], rate: float, temperature: float, steps: int,
                                  lora: bool, budget: int | None, weight: float, options: dict[str, Any]) -> None:  # fmt: skip
    data = sample_spec().model_dump()
    data |= {"name": name.strip(), "notes": notes, "tags": tags}
    data["training"] |= {"learning_rate": rate, "max_steps": steps, "token_budget": budget}
    data["rollout"]["temperature"] = temperature
    data["lora"]["enabled"] = lora
    data["data"]["options"] = options
    data["rewards"] = [{"name": "last_number_match", "weight": weight}, {"name": "mine", "version": 3}]
    spec = RunSpec.model_validate(data)
    again, problems = forms.validate(posted(forms.from_spec(spec)))
    assert problems == []
    assert again == spec


def test_mappings_in_fields_of_one_line_have_no_line_ends() -> None:
    """A browser takes them out."""
    names = {"question": "prompt", "answer: long": "solution", "x" * 100: "y"}
    spec = RunSpec.model_validate({"data": {"source": "a/b", "rename_columns": names}})
    post = posted(forms.from_spec(spec))
    assert "\n" not in post["data.rename_columns"]
    assert forms.validate(post) == (spec, [])


def test_every_setting_has_a_control_with_label_and_help() -> None:
    form = forms.from_spec(RunSpec())
    controls = {field.path: field for section in form.sections for field in section.fields}
    assert set(controls) == {path for path, _ in forms.leaves()}
    assert all(field.label and field.help for field in controls.values())
    assert controls["training.loss_type"].choices[0] == "dapo"
    assert controls["model.trust_remote_code"].advanced


def test_settings_on_which_others_depend_exist() -> None:
    paths = {path for path, _ in forms.leaves()}
    assert set(forms.SHOWN_IF) <= paths
    assert {by for by, _ in forms.SHOWN_IF.values()} <= paths


@pytest.mark.parametrize("path, text, sentence", [
    ("training.max_steps", "many", "Found 'many'; a whole number is needed."),
    ("training.max_steps", "0", "Found '0'; at least 1 is needed."),
    ("training.learning_rate", "-1", "Found '-1'; a number above 0 is needed."),
    ("rollout.top_p", "2", "Found '2'; at most 1 is allowed."),
    ("rollout.temperature", "nan", ""),
    ("training.loss_type", "ppo", "Found 'ppo'; allowed are 'dapo', 'grpo'"),
    ("exporters.mlflow_url", "file:///etc", "Found 'file:///etc'; http://... or https://... is needed, or nothing."),
    ("name", "", "This is empty; a value is needed."),
    ("data.options", "{a: ", "Not valid YAML"),
    ("data.options", "[1]", "Found [1]; a mapping of names to values is needed."),
    ("data.rename_columns", "question", "Found 'question'; a mapping of names to values is needed."),
])  # fmt: skip
def test_a_wrong_value_is_said_at_its_field(path: str, text: str, sentence: str) -> None:
    spec, problems = forms.validate({**posted(forms.from_spec(sample_spec())), path: text})
    assert spec is None
    assert [problem.field for problem in problems] == [path]
    assert problems[0].message.startswith(sentence)


def test_settings_that_do_not_fit_together_are_said_once() -> None:
    post = {**posted(forms.from_spec(sample_spec())), "rollout.num_generations": "7"}
    spec, problems = forms.validate(post)
    assert spec is None
    assert [problem.field for problem in problems] == [""]
    assert "not a multiple of 7" in problems[0].message


def test_the_difference_of_two_specs_names_settings() -> None:
    before = sample_spec().model_dump(mode="json")
    after = {**before, "training": {**before["training"], "learning_rate": 1e-3}, "rewards": []}
    assert [path for path, *_ in forms.spec_diff(before, after)] == ["rewards", "training.learning_rate"]
    assert forms.spec_diff(before, before) == []


@pytest.fixture
def post() -> dict[str, str]:
    return posted(forms.from_spec(sample_spec()))


def test_launching_from_the_form_queues_the_run(as_ada: Client, ada: User, post: dict[str, str]) -> None:
    response = as_ada.post("/runs/new/", {**post, "action": "launch"})
    run = Run.objects.get()
    assert response.headers["Location"] == f"/runs/{run.pk}/"
    assert (run.state, run.owner, run.run_spec()) == (State.QUEUED, ada, sample_spec())


def test_a_draft_is_saved_edited_and_launched(as_ada: Client, post: dict[str, str]) -> None:
    as_ada.post("/runs/new/", {**post, "action": "draft"})
    run = Run.objects.get()
    assert run.state == State.DRAFT
    assert f'value="{sample_spec().training.max_steps}"'.encode() in as_ada.get(f"/runs/{run.pk}/edit/").content
    as_ada.post(f"/runs/{run.pk}/edit/", {**post, "training.max_steps": "7", "action": "draft"})
    run.refresh_from_db()
    assert run.run_spec().training.max_steps == 7
    as_ada.post(f"/runs/{run.pk}/launch/")
    run.refresh_from_db()
    assert run.state == State.QUEUED
    assert as_ada.get(f"/runs/{run.pk}/edit/").status_code == 302


def test_a_problem_stores_nothing_and_keeps_what_was_typed(as_ada: Client, post: dict[str, str]) -> None:
    response = as_ada.post("/runs/new/", {**post, "notes": "kept", "training.max_steps": "x", "action": "launch"})
    assert response.status_code == 422
    assert "a whole number is needed" in response.content.decode()
    assert "kept</textarea>" in response.content.decode()
    assert not Run.objects.exists()


def test_a_reward_row_is_added_without_javascript(as_ada: Client, post: dict[str, str]) -> None:
    response = as_ada.post("/runs/new/", {**post, "action": "add-reward"})
    assert 'name="rewards.1.name"' in response.content.decode()


def test_yaml_out_and_in_again_is_the_same(as_ada: Client, post: dict[str, str]) -> None:
    exported = as_ada.post("/runs/new/", {**post, "action": "export"})
    assert exported.headers["Content-Disposition"] == 'attachment; filename="sample-one-digit-products.yaml"'
    imported = as_ada.post("/runs/new/", {"yaml": exported.content.decode(), "action": "import"})
    assert imported.status_code == 200
    assert "one-digit products" in imported.content.decode()
    assert RunSpec.from_yaml(exported.content.decode()) == sample_spec()


@pytest.mark.parametrize("text, expected", [
    ("[1, 2]", "a mapping of sections"), ("a: [", "not valid YAML"), ("training: {max_step: 3}", "training.max_step"),
])  # fmt: skip
def test_yaml_that_is_no_spec_says_why(as_ada: Client, text: str, expected: str) -> None:
    response = as_ada.post("/runs/new/", {"yaml": text, "action": "import"})
    assert response.status_code == 422
    assert expected in response.content.decode()


def test_a_clone_remembers_its_parent_and_shows_the_difference(as_grace: Client, ada: User, grace: User) -> None:
    parent = services.create_run(sample_spec(), ada)
    form = as_grace.get(f"/runs/new/?from={parent.pk}").content.decode()
    assert "sample: one-digit products (copy)" in form
    post = {**posted(forms.from_spec(sample_spec())), "from": str(parent.pk), "training.learning_rate": "0.001"}
    checked = as_grace.post("/runs/check/", post).json()
    assert checked["diff"] == [{"path": "training.learning_rate", "before": 0.0002, "after": 0.001}]
    as_grace.post("/runs/new/", {**post, "action": "draft"})
    clone = Run.objects.get(owner=grace)
    assert clone.parent == parent
    page = as_grace.get(f"/runs/{clone.pk}/settings/").content.decode()
    assert "training.learning_rate" in page


def test_the_live_check_previews_a_step_and_prompts(as_ada: Client, post: dict[str, str]) -> None:
    answer = as_ada.post("/runs/check/", post).json()
    assert answer["problems"] == []
    assert "64 samples: 8 prompts × 8 rollouts" in answer["facts"][0]
    assert len(answer["prompts"]) == 3
    assert "multiplication" in answer["prompts"][0]["text"]


def test_the_live_check_survives_a_file_that_breaks_later(as_ada: Client, post: dict[str, str], tmp_path: Any) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\nnonsense\n')
    answer = as_ada.post("/runs/check/", {**post, "data.source": str(path), "data.options": ""}).json()
    assert [problem["field"] for problem in answer["problems"]] == ["data.source"]
    assert "line 2" in answer["problems"][0]["message"]


def test_a_reward_leads_to_a_run_that_uses_it(as_ada: Client, ada: User) -> None:
    create_function(STARTER, "", ada)
    page = as_ada.get("/runs/new/?reward=my_reward").content.decode()
    assert 'value="my_reward: first try"' in page
    chosen = re.search(r'<select[^>]*id="id_rewards\.0\.name".*?</select>', page, re.DOTALL)
    assert chosen is not None
    assert re.search(r'<option[^>]*value="my_reward"[^>]* selected', chosen[0])
    data = posted(forms.from_spec(sample_spec())) | {"rewards.0.name": "my_reward", "action": "draft"}
    as_ada.post("/runs/new/", data)
    assert Run.objects.get().run_spec().rewards[0].name == "my_reward"
    assert as_ada.get("/runs/new/?reward=nobody_wrote_it").status_code == 404


def test_a_learning_rate_at_which_an_adapter_stands_still_is_said(as_ada: Client, post: dict[str, str]) -> None:
    slow = as_ada.post("/runs/check/", {**post, "training.learning_rate": "1e-6"}).json()
    assert slow["facts"][0] == "A LoRA adapter hardly moves at a learning rate of 1e-06; about 1e-4 is usual."
    assert slow["problems"] == []
    full = {key: value for key, value in post.items() if key != "lora.enabled"}
    facts = as_ada.post("/runs/check/", {**full, "training.learning_rate": "1e-6"}).json()["facts"]
    assert not any("LoRA adapter hardly" in fact for fact in facts)
