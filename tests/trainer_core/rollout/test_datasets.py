from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.trainer_core.rollout.mini_trainer import config_for
from trainer_core.checks import check_arguments
from trainer_core.rewards import reasoning_gym_score
from trainer_core.rollout.datasets import check_prompts, load_prompts, prompt_problem
from trainer_core.spec import DataSpec


def test_reasoning_gym_rows_score_their_own_answers() -> None:
    rows = load_prompts(
        DataSpec(source="reasoning_gym:products", size=6, seed=3, options={"max_digits": 1}, prompt_suffix="Go.")
    )
    assert len(rows) == 6
    assert rows[0]["prompt"][0]["role"] == "user"
    assert rows[0]["prompt"][0]["content"].endswith("final answer. Go.")
    answers = [f"it is {answer}" for answer in rows["answer"]]
    assert reasoning_gym_score(answers, rows["reasoning_gym_task"], rows["reasoning_gym_entry"]) == [1.0] * 6
    again = load_prompts(DataSpec(source="reasoning_gym:products", size=6, seed=3, options={"max_digits": 1}))
    assert again["answer"] == rows["answer"]


def test_metadata_of_varying_shape_loads() -> None:
    assert len(load_prompts(DataSpec(source="reasoning_gym:countdown", size=8))) == 8


def test_files(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"prompt": ["1+1?", "2+2?"], "answer": ["2", "4"]})
    table.to_json(tmp_path / "rows.jsonl")
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        rows = load_prompts(DataSpec(source=str(tmp_path / name), prompt_suffix="!"))
        assert rows[1]["prompt"] == [{"role": "user", "content": "2+2? !"}]
        assert [str(answer) for answer in rows["answer"]] == ["2", "4"]


def test_chat_prompts_are_kept(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": messages}) + "\n")
    assert load_prompts(DataSpec(source=str(tmp_path / "chat.jsonl"), prompt_suffix="!"))[0]["prompt"] == messages


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("a.jsonl", '{"question": "1", "answer": "2"}\n', "has no 'prompt' column; found question, answer"),
        ("b.jsonl", '{"prompt": 3}\n', "holds int '3'; text or a list of chat messages is expected"),
        ("c.jsonl", '{"prompt": [{"text": "x"}]}\n', "without 'role' and 'content'"),
        ("d.jsonl", '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}\n', "images are not supported"),
        ("e.jsonl", '{"prompt": " "}\n', "holds empty text"),
        ("f.jsonl", "not json\n", "cannot be read as jsonl"),
        ("g.csv", "", "is empty"),
        ("h.parquet", "PAR1", "cannot be read as parquet"),
    ],
)
def test_unusable_files_get_a_sentence(tmp_path: Path, name: str, content: str, problem: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=problem):
        load_prompts(DataSpec(source=str(path)))


@pytest.mark.parametrize(
    "data, problem",
    [
        (DataSpec(source="reasoning_gym:produkts"), r"no task 'produkts' \(it has \d+, such as products"),
        (DataSpec(source="reasoning_gym:products", options={"digits": 1}), r"does not take these options .*'digits'"),
        (
            DataSpec(source="reasoning_gym:products", options={"min_terms": 5, "max_terms": 2}),
            "max_terms must be >= min_terms",
        ),
        (DataSpec(source="missing.jsonl"), "missing.jsonl does not exist on the training host"),
        (DataSpec(source="rows.csv", options={"a": 1}), "is no reasoning_gym:<task>"),
        (DataSpec(source="nobody/nothing"), "'nobody/nothing' .* cannot be loaded"),
    ],
)
def test_other_mistakes_get_a_sentence(data: DataSpec, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        load_prompts(data)
    assert "\n" not in str(caught.value)


def test_an_empty_dataset() -> None:
    with pytest.raises(ValueError, match="x has no rows"):
        check_prompts(datasets.Dataset.from_dict({"prompt": []}), "x")


@pytest.mark.parametrize(
    "prompt, text",
    [
        (3, r"a prompt of train_dataset holds int '3'; it must be text, or a list of messages"),
        ([{"content": "q"}], "holds an entry without 'role' and 'content'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "images are not supported"),
    ],
)
def test_prompts_of_a_library_user_are_looked_at_before_the_model_loads(tmp_path: Path, prompt: Any, text: str) -> None:
    rows = datasets.Dataset.from_list([{"prompt": prompt}])
    config = config_for("http://127.0.0.1:9", tmp_path)
    with pytest.raises(ValueError, match=text):
        check_arguments("model", None, rows, None, config)
    with pytest.raises(ValueError, match=text):
        check_arguments("model", None, rows.to_iterable_dataset(), None, config)


def test_an_example_of_a_call_may_have_no_text() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert prompt_problem([{"role": "assistant", "content": None, "tool_calls": [call]}]) is None
