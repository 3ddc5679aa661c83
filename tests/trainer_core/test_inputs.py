"""The trainer's own checks before a server is started, and the look into datasets while somebody fills in the form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_stand_in import Hub, running_hub
from tests.hub_stand_in import gsm8k as make_gsm8k
from trainer_core import inputs
from trainer_core.inputs import BadInput, load_inputs
from trainer_core.peek import peek
from trainer_core.rollout.datasets import first_rows, load_prompts
from trainer_core.spec import DataSpec, RunSpec

PRODUCTS: dict[str, Any] = {"source": "reasoning_gym:products"}


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    """A folder laid out as openai/gsm8k: two configurations with columns question and answer."""
    return str(make_gsm8k(tmp_path / "gsm8k"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with openai/gsm8k, private, for programs that are started."""
    with running_hub() as hub:
        hub.add("datasets", "openai/gsm8k", make_gsm8k(tmp_path / "gsm8k"), private=True)
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def spec(**sections: Any) -> RunSpec:
    return RunSpec.model_validate({"data": PRODUCTS, **sections})


def look(run: RunSpec) -> dict[str, Any]:
    """What the program says of the run's training data."""
    request = json.dumps({"spec": run.model_dump(mode="json"), "datasets": ["data"], "agent": "none"})
    done = subprocess.run(
        [sys.executable, "-m", "trainer_core.peek"], input=request, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_configuration_and_other_columns_are_used(gsm8k: str) -> None:
    rows = load_prompts(DataSpec(source=gsm8k, config="socratic", rename_columns={"question": "prompt"}))
    assert rows[0]["prompt"] == [{"role": "user", "content": "socratic train 0 + 0?"}]
    assert rows.column_names == ["prompt", "answer"]
    stream = load_prompts(DataSpec(source=gsm8k, config="main", rename_columns={"question": "prompt"}, streaming=True))
    assert next(iter(stream)) == {"prompt": [{"role": "user", "content": "main train 0 + 0?"}], "answer": "0"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("changes, sentence", [
    ({"config": ""}, "has several configurations: main, socratic; name one of them"),
    ({"config": "mian"}, "has no configuration 'mian'; it has main, socratic"),
    ({"split": "dev"}, "has no split 'dev'; it has train, test"),
    ({"rename_columns": {}}, "has no 'prompt' column; found question, answer"),
    ({"rename_columns": {"qestion": "prompt"}}, "has no column 'qestion' to rename; its columns are: question, answer"),
    ({"rename_columns": {"question": "answer"}}, "two columns 'answer'; its columns are: question, answer"),
])  # fmt: skip
def test_wrong_names_are_told_with_those_there_are(
    gsm8k: str, changes: dict[str, Any], sentence: str, streaming: bool
) -> None:
    data = {"source": gsm8k, "config": "main", "rename_columns": {"question": "prompt"}, "streaming": streaming}
    with pytest.raises(ValueError, match=r"gsm8k.* has|gsm8k") as caught:
        load_prompts(DataSpec.model_validate(data | changes))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_columns_of_files_and_generators_are_renamed_too(tmp_path: Path, suffix: str) -> None:
    import datasets

    path = str(tmp_path / f"rows{suffix}")
    table = datasets.Dataset.from_dict({"question": ["1+1?"], "prompt": ["unused"], "answer": ["2"]})
    getattr(table, {".jsonl": "to_json", ".csv": "to_csv", ".parquet": "to_parquet"}[suffix])(path)
    names = {"question": "prompt", "prompt": "other", "answer": "solution"}
    row = load_prompts(DataSpec(source=path, rename_columns=names))[0]
    assert (row["prompt"][0]["content"], str(row["solution"]), row["other"]) == ("1+1?", "2", "unused")
    columns, rows = first_rows(DataSpec(source=path, rename_columns=names), 3)
    assert columns == ["question", "prompt", "answer"]
    assert [(row["prompt"], str(row["solution"])) for row in rows] == [("1+1?", "2")]
    assert "solution" in load_prompts(DataSpec(**PRODUCTS, size=2, rename_columns={"answer": "solution"})).column_names


def test_evaluation_has_the_names_of_training_unless_it_has_its_own() -> None:
    data = {"source": "openai/gsm8k", "config": "main", "rename_columns": {"question": "prompt"}}
    evaluation: dict[str, Any] = {"every_steps": 5, "source": "openai/gsm8k"}

    def held_out(**changes: Any) -> DataSpec:
        found = spec(data=data, evaluation=evaluation | changes).evaluation_data()
        assert found is not None
        return found

    same = held_out()
    assert (same.config, same.split, same.rename_columns) == ("main", "test", {"question": "prompt"})
    other = held_out(source="other/data", rename_columns={"q": "prompt"})
    assert (other.config, other.rename_columns) == ("", {"q": "prompt"})
    generated = held_out(source="reasoning_gym:products")
    assert (generated.config, generated.rename_columns) == ("", {})


def test_names_survive_yaml() -> None:
    data = {"source": "openai/gsm8k", "config": "main", "rename_columns": {"question": "prompt", "ä: b": "answer"}}
    run = spec(data=data, evaluation={"config": "main", "rename_columns": {"q": "prompt"}})
    assert RunSpec.from_yaml(run.to_yaml()) == run


@pytest.mark.parametrize("sections, field, sentence", [
    ({"data": {"source": "nowhere.jsonl"}}, "data", "nowhere.jsonl does not exist"),
    ({"evaluation": {"every_steps": 5, "source": "nowhere.csv"}}, "evaluation", "evaluation: dataset file nowhere.csv does"),
    ({"rewards": [{"name": "nobody_wrote_it"}]}, "rewards", "is not built in"),
    ({"rewards": [{"name": "greeting", "version": 2}]}, "rewards", "version 2 of reward 'greeting' cannot be read"),
    ({"rewards": [{"name": "http_reward"}]}, "rewards", "needs the column 'reward_url'"),
    ({"agent": {"tools": ["calculater"]}}, "agent.tools", "there is no tool 'calculater'"),
    ({"agent": {"environment": "guess"}}, "agent.environment", "there is no environment 'guess'"),
    ({"agent": {"environment": "guess_number", "environment_options": {"lo": 1}}}, "agent.environment", "'lo'"),
])  # fmt: skip
def test_each_input_is_checked_and_named(sections: dict[str, Any], field: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        load_inputs(spec(**sections), tmp_path, few_generated=True)
    assert caught.value.field == field
    assert sentence in str(caught.value)


def test_everything_a_run_names_is_loaded(tmp_path: Path) -> None:
    run = spec(
        data=PRODUCTS | {"size": 50}, evaluation={"every_steps": 5, "size": 20}, agent={"tools": ["calculator"]},
        rewards=[{"name": "exact_match"}],
    )  # fmt: skip
    found = load_inputs(run, tmp_path)
    assert (len(found.train), len(found.evaluation), len(found.rewards), len(found.tools)) == (50, 20, 1, 1)
    assert found.environment is None
    few = load_inputs(run, tmp_path, few_generated=True)
    assert (len(few.train), len(few.evaluation)) == (8, 8)


def test_the_program_ends_with_its_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    arguments = ["--spec", str(path), "--run-dir", str(tmp_path)]
    path.write_text(spec().to_yaml())
    assert inputs.main(arguments) == 0
    path.write_text(spec(agent={"tools": ["calculater"]}).to_yaml())
    assert inputs.main(arguments) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("There is no tool 'calculater' on the training host")
    path.write_text(spec().to_yaml())
    assert inputs.main([*arguments, "--resume", str(tmp_path)]) == 1
    assert "has no rollout_state.json" in capsys.readouterr().err.splitlines()[-1]


def test_the_program_takes_no_torch(tmp_path: Path) -> None:
    """Its import would take longer than all checks, and memory beside a server."""
    (tmp_path / "spec.yaml").write_text(spec(agent={"tools": ["calculator"], "environment": "guess_number"}).to_yaml())
    program = (
        "import sys; from trainer_core import inputs\n"
        f"code = inputs.main(['--spec', {str(tmp_path / 'spec.yaml')!r}, '--run-dir', {str(tmp_path)!r}])\n"
        "print(code, sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_private_hub_dataset_is_looked_into_with_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    run = spec(data={"source": "openai/gsm8k", "config": "main", "rename_columns": {"question": "prompt"}})
    (problem,) = look(run)["problems"]
    assert problem["field"] == "data"
    assert "'openai/gsm8k'" in problem["message"]
    monkeypatch.setenv("HF_TOKEN", hub.token)
    found = look(run)["datasets"]["data"]
    assert found["columns"] == ["question", "answer"]
    assert found["rows"] == [{"prompt": f"main train {n} + {n}?", "answer": str(2 * n)} for n in range(3)]
    (problem,) = look(spec(data={"source": "openai/gsm8k"}))["problems"]
    assert problem["message"].startswith("Dataset 'openai/gsm8k' has several configurations: main, socratic")


def test_a_hub_that_does_not_answer_is_no_fault_of_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    answer = look(spec(data={"source": "openai/gsm8k"}))
    assert answer["problems"] == []
    assert "openai/gsm8k" in answer["unread"][0]


def test_a_look_names_what_rewards_and_tools_lack(gsm8k: str) -> None:
    names = {"question": "prompt", "answer": "reply"}
    run = spec(
        data={"source": gsm8k, "config": "main", "rename_columns": names}, agent={"tools": ["calculater"]},
        evaluation={"every_steps": 5, "source": gsm8k, "rename_columns": {"question": "prompt"}},
    )  # fmt: skip
    answer = peek(run, ["data", "evaluation"], "all")
    assert [problem["field"] for problem in answer["problems"]] == ["rewards", "agent.tools"]
    assert "the dataset has prompt, reply" in answer["problems"][0]["message"]
    assert answer["datasets"]["evaluation"]["rows"][0]["prompt"] == "main test 0 + 0?"
    assert [problem["field"] for problem in peek(run, [], "builtin")["problems"]] == []
