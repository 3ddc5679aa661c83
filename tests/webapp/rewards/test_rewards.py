"""Writing reward functions: checked by line, stored as versions that never change, tried in the sandbox."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from django.test import Client

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.rewards import samples, services, testing
from webapp.rewards.forms import STARTER, TryForm
from webapp.rewards.models import RewardFunction
from webapp.runs.models import Run
from webapp.runs.sample import sample_spec

pytestmark = pytest.mark.django_db


def returning(expression: str) -> str:
    return f"def mine(completions, **columns):\n    return {expression}\n"


def outcome_of(source: str, **data: str) -> testing.Outcome:
    form = TryForm({"on": "pasted", "completions": "12\n---\n7", "columns": "answer: 12", **data})
    assert form.is_valid(), form.errors
    return testing.run_test(source, form)


def test_the_starter_is_stored_and_does_what_it_says(as_ada: Client) -> None:
    response = as_ada.post("/rewards/new/", {"source": STARTER.replace("\n", "\r\n"), "description": "numbers"})
    assert response.headers["Location"] == "/rewards/my_reward/"
    function = RewardFunction.objects.get()
    assert function.latest is not None
    assert function.latest.source == STARTER
    result = outcome_of(STARTER, completions="3 * 4 equals 12.\n---\nIt is 11.\n---\nI do not know.")
    assert result.error is None
    assert [row.value for row in result.calls[0].rows] == [1.0, 0.1, 0.0]
    assert "process" in result.level or "rlimits" in result.level


@pytest.mark.parametrize("source, line, words", [
    ("def mine(completions, **columns):\n    return [\n", 2, "never closed"),
    ("mine = lambda completions, **columns: [0]\n", 1, "lambda"),
    ("x = 1\n", 0, "function"),
    ("\n\ndef exact_match(completions, **columns):\n    return []\n", 3, "built-in"),
    ("def test(completions, **columns):\n    return []\n", 1, "reserved"),
])  # fmt: skip
def test_a_source_that_can_not_be_used_is_refused_by_line(as_ada: Client, source: str, line: int, words: str) -> None:
    answer = as_ada.post("/rewards/validate/", {"source": source}).json()
    assert answer["problems"][0]["line"] == line
    assert words in answer["problems"][0]["message"]
    response = as_ada.post("/rewards/new/", {"source": source})
    assert response.status_code == 422
    assert words in response.content.decode()
    assert not RewardFunction.objects.exists()


def test_versions_are_added_never_changed(as_ada: Client, ada: User) -> None:
    function = services.create_function(returning("[0] * len(completions)"), "", ada)
    as_ada.post("/rewards/mine/edit/", {"source": returning("[1] * len(completions)"), "note": "one"})
    same = as_ada.post("/rewards/mine/edit/", {"source": returning("[1] * len(completions)")}, follow=True)
    assert "Nothing changed" in same.content.decode()
    assert list(function.versions.values_list("number", flat=True)) == [2, 1]
    first = function.versions.get(number=1)
    first.source = "changed"
    with pytest.raises(ValueError, match="stored"):
        first.save()
    page = as_ada.get("/rewards/mine/").content.decode()
    assert 'class="del">-    return [0]' in page
    assert 'class="add">+    return [1]' in page
    assert as_ada.get("/rewards/mine/v1/").status_code == 200
    assert as_ada.get("/rewards/mine/v9/").status_code == 404


def test_a_version_keeps_the_name(as_ada: Client, ada: User) -> None:
    services.create_function(returning("[]"), "", ada)
    response = as_ada.post("/rewards/mine/edit/", {"source": returning("[]").replace("mine", "other")})
    assert response.status_code == 422
    assert "keep the name" in response.content.decode()


def test_two_functions_can_not_share_a_name(as_grace: Client, ada: User) -> None:
    services.create_function(returning("[]"), "", ada)
    response = as_grace.post("/rewards/new/", {"source": returning("[]")})
    assert "already" in response.content.decode()


def test_only_the_author_and_admins_change_a_function(as_grace: Client, as_admin: Client, ada: User) -> None:
    services.create_function(returning("[]"), "", ada)
    assert as_grace.get("/rewards/mine/").status_code == 200
    assert as_grace.get("/rewards/mine/edit/").status_code == 403
    assert as_grace.post("/rewards/mine/archive/", {"archived": "1"}).status_code == 403
    assert as_admin.post("/rewards/mine/archive/", {"archived": "1"}).status_code == 302
    assert RewardFunction.objects.get().archived


@pytest.mark.parametrize("expression, words", [
    ("[1]", "returned 1 rewards for 2 completions"),
    ("[float('nan')] * 2", "nan"),
    ("'much'", "a list of 2 numbers"),
    ("[1 / 0]", "division by zero"),
])  # fmt: skip
def test_what_a_function_does_wrong_is_said(expression: str, words: str) -> None:
    result = outcome_of(returning(expression))
    assert result.error is not None
    assert words in str(result.error)
    if "1 / 0" in expression:
        assert (result.error.line, result.error_source) == (2, "return [1 / 0]")


def test_an_endless_loop_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "DEADLINE_S", 2.0)
    result = outcome_of("def mine(completions, **columns):\n    while True:\n        pass\n")
    assert result.error is not None
    assert result.error.type == "Timeout"


@pytest.mark.parametrize("data, words", [
    ({"completions": " \n---\n"}, "no completion"),
    ({"columns": "{a: "}, "not valid YAML"),
    ({"columns": "[1]"}, "mapping"),
    ({"on": "stored"}, "Choose a run"),
])  # fmt: skip
def test_a_sample_that_is_none_is_refused(data: dict[str, str], words: str) -> None:
    assert words in outcome_of(returning("[0, 0]"), **data).refusal


def test_stored_rollouts_are_scored_beside_what_the_run_gave_them(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, steps=3)
    # The seeded prompts come from elsewhere, so the generated answer column is not theirs: look at the text instead.
    source = returning("[float('equals' in completion[0]['content']) for completion in completions]")
    form = {"source": source, "on": "stored", "run": str(run.pk), "step": "1"}
    response = as_ada.post("/rewards/test/", form, headers={"HX-Request": "true"})
    page = response.content.decode()
    assert "<html" not in page
    assert "Step 1, row 2" in page
    assert "In the run" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page.split("test-values")[1]
    stored = [rollout.data["completion"][0]["content"] for rollout in run.rollouts.filter(step=1)]
    outcome = outcome_of(source, on="stored", run=str(run.pk), step="1")
    assert [row.value for call in outcome.calls for row in call.rows] == [float("equals" in text) for text in stored]


def test_columns_of_stored_rollouts_are_those_of_the_dataset(ada: User) -> None:
    run = seed.make_run(ada, steps=1)
    sample = samples.stored(run, None)[0]
    spec = run.run_spec()
    import reasoning_gym

    entry = reasoning_gym.create_dataset("products", size=500, seed=42, **spec.data.options)[0]
    assert sample.arguments["answer"] == [entry["answer"]] * 8
    assert len(sample.arguments["completions"]) == len(sample.texts) == 8


def test_columns_of_a_file_are_read_by_row(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n')
    data = sample_spec().data.model_copy(update={"source": str(path), "options": {}})
    assert samples.columns_of(data, 1) == {"answer": "2"}
    assert samples.columns_of(data, 5) == {}
    renamed = data.model_copy(update={"rename_columns": {"answer": "solution"}})
    assert samples.columns_of(renamed, 1) == {"solution": "2"}


def test_columns_of_a_parquet_file_are_read_by_row(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), path)
    data = sample_spec().data.model_copy(update={"source": str(path), "options": {}})
    assert samples.columns_of(data, 1) == {"answer": "2"}
    assert samples.columns_of(data, 2) == {}


def test_a_function_lists_the_runs_that_use_it(as_ada: Client, ada: User) -> None:
    services.create_function(returning("[]"), "", ada)
    services.create_function(returning("[]").replace("mine", "mine_too"), "", ada)
    spec = sample_spec().model_copy(
        update={"rewards": [sample_spec().rewards[0].model_copy(update={"name": "mine_too"})]}
    )
    run = seed.make_run(ada, state="draft", spec=spec)
    assert isinstance(run, Run)
    assert [usage.version for usage in services.usages(RewardFunction.objects.get(name="mine_too"))] == [1]
    assert services.usages(RewardFunction.objects.get(name="mine")) == []
    assert "No run uses it yet" in as_ada.get("/rewards/mine/").content.decode()
