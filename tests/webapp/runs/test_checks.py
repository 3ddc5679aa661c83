"""What is found before anything expensive starts: one sentence, at the field to change."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from django.utils import timezone

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.hosts.models import Device, Host
from webapp.rewards import services as rewards
from webapp.rewards.forms import STARTER
from webapp.runs import checks, data_checks, services
from webapp.runs.problems import Problem
from webapp.runs.sample import sample_spec

pytestmark = pytest.mark.django_db


def spec_with(**changes: Any) -> RunSpec:
    """The sample spec with `section__field=value` changes."""
    data = sample_spec().model_dump()
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        (data[section] if section else data)[name] = value
    return RunSpec.model_validate(data)


def the_problem(**changes: Any) -> Problem:
    problems = checks.check_spec(spec_with(**changes), None)
    assert len(problems) == 1, problems
    assert problems[0].message.endswith(".")
    return problems[0]


def test_the_sample_run_has_no_problem() -> None:
    assert checks.check_spec(sample_spec(), None) == []


def test_a_model_folder_must_exist_and_be_a_model(tmp_path: Path) -> None:
    missing = the_problem(model__path=str(tmp_path / "nowhere"))
    assert missing.field == "model.path"
    assert "no folder" in missing.message
    assert "no config.json" in the_problem(model__path=str(tmp_path)).message
    (tmp_path / "config.json").write_text("{}")
    assert checks.check_spec(spec_with(model__path=str(tmp_path)), None) == []


def test_a_hub_model_is_refused_when_the_hub_is_out_of_reach() -> None:
    problem = the_problem(model__path="Qwen/Qwen3-0.6B")  # HF_HUB_OFFLINE is set in tests
    assert problem.field == "model.path"
    assert "can't be reached" in problem.message
    assert "smollm2-135m-instruct" in problem.message


def test_text_that_is_no_hub_id_is_said_to_be_none() -> None:
    assert "nor a hub id" in the_problem(model__path="what is this?").message


def test_an_unknown_reasoning_gym_task_names_near_ones() -> None:
    problem = the_problem(data__source="reasoning_gym:product")
    assert problem.field == "data.source"
    assert "products" in problem.message


def test_generator_options_are_checked_by_the_generator() -> None:
    unknown = the_problem(data__options={"max_digit": 1})
    assert unknown.field == "data.options"
    assert "max_digits" in unknown.message
    assert "must be >=" in the_problem(data__options={"min_digits": 5, "max_digits": 2}).message


@pytest.mark.parametrize("suffix, text", [
    (".jsonl", '{"question": "1+1", "answer": "2"}\n'), (".csv", "question,answer\n1+1,2\n"),
])  # fmt: skip
def test_a_file_without_a_prompt_column_has_its_columns_named(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_text(text)
    problem = the_problem(data__source=str(path), data__options={})
    assert problem.field == "data.source"
    assert "question, answer" in problem.message


def test_parquet_columns_are_read_from_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1"], "answer": ["2"]}), path)
    assert data_checks.file_columns(path) == ["prompt", "answer"]
    assert checks.check_spec(spec_with(data__source=str(path), data__options={}), None) == []
    path.write_bytes(b"not parquet")
    assert "can't be read" in the_problem(data__source=str(path), data__options={}).message


@pytest.mark.parametrize("text, expected", [("", "empty"), ("[1, 2]\n", "list"), ("{nonsense\n", "not JSON")])
def test_a_broken_file_is_described(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    assert expected in the_problem(data__source=str(path), data__options={}).message


def test_a_reward_that_needs_a_column_the_file_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "1+1"}) + "\n")
    problem = the_problem(data__source=str(path), data__options={})
    assert problem.field == "rewards"
    assert "'answer'" in problem.message


def test_rewards_must_exist_in_the_version_named(ada: User) -> None:
    unknown = the_problem(rewards=[{"name": "nobody_wrote_this"}])
    assert unknown.field == "rewards.0.name"
    assert "last_number_match" in unknown.message
    function = rewards.create_function(STARTER, "", ada)
    assert checks.check_spec(spec_with(rewards=[{"name": function.name}]), None) == []
    version = the_problem(rewards=[{"name": "last_number_match"}, {"name": function.name, "version": 7}])
    assert version.field == "rewards.1.version"
    assert "its versions are 1" in version.message
    assert "built in" in the_problem(rewards=[{"name": "last_number_match", "version": 1}]).message


def test_weights_that_are_all_zero_teach_nothing() -> None:
    assert the_problem(rewards=[{"name": "last_number_match", "weight": 0}]).field == "rewards"


def test_devices_are_only_missed_when_hosts_are_known() -> None:
    wanted = {"resources__trainer_gpus": 2}
    assert checks.check_spec(spec_with(**wanted), None) == []
    host = Host.objects.create(name="big")
    for index in range(2):
        Device.objects.create(host=host, uuid=f"GPU-{index}", kind="gpu", index=index, name="H200")
    problem = the_problem(**wanted)
    assert problem.field == "resources"
    assert "big has 2" in problem.message
    Device.objects.create(host=host, uuid="GPU-2", kind="gpu", index=2, name="H200")
    assert checks.check_spec(spec_with(**wanted), None) == []


def test_a_trainer_on_several_hosts_needs_devices_on_each() -> None:
    wanted = {"resources__trainer_hosts": 2}
    for name, gpus in (("big", 4), ("small", 0)):
        host = Host.objects.create(name=name, last_seen_at=timezone.now())
        for index in range(gpus):
            Device.objects.create(host=host, uuid=f"GPU-{name}-{index}", kind="gpu", index=index, name="H200")
    assert the_problem(**wanted).message == (
        "2 hosts are needed, with 2 GPUs on one for rollouts and training and 1 on each other, or a CPU slot on each, but big "
        "has 4."
    )
    Device.objects.create(host=host, uuid="GPU-small-0", kind="gpu", name="H200")
    assert checks.check_spec(spec_with(**wanted), None) == []


def test_a_processor_does_not_help_where_gpus_are_up_since_no_run_goes_there() -> None:
    """The rule is that of claiming: a host without GPUs leaves runs to hosts with some."""
    wanted = {"resources__trainer_gpus": 2}
    cpu = Host.objects.create(name="cpu", last_seen_at=timezone.now())
    Device.objects.create(host=cpu, uuid="cpu:cpu", kind="cpu", name="2 cores")
    assert checks.check_spec(spec_with(**wanted), None) == []
    big = Host.objects.create(name="big", last_seen_at=timezone.now())
    Device.objects.create(host=big, uuid="GPU-0", kind="gpu", name="H200")
    assert "but big has 1" in the_problem(**wanted).message
    Host.objects.filter(pk=big.pk).update(drained=True)
    assert checks.check_spec(spec_with(**wanted), None) == []


def test_a_full_disk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 2**29, 2**29))
    problem = the_problem()
    assert problem.field == "checkpoints"
    assert "0.5 GiB free" in problem.message


def test_a_draft_pins_the_newest_version_of_its_rewards(ada: User) -> None:
    function = rewards.create_function(STARTER, "", ada)
    rewards.add_version(function, STARTER + "\n", "", ada)
    run = services.create_run(spec_with(rewards=[{"name": function.name}]), ada)
    rewards.add_version(function, STARTER + "\n\n", "", ada)
    assert run.run_spec().rewards[0].version == 2


def test_a_renamed_column_is_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n')
    data: dict[str, Any] = {"data__source": str(path), "data__options": {}}
    assert checks.check_spec(spec_with(**data, data__rename_columns={"question": "prompt"}), None) == []
    wrong = the_problem(**data, data__rename_columns={"qestion": "prompt"})
    assert wrong == Problem(
        "data.rename_columns", f"Dataset {path} has no column 'qestion' to rename; its columns are: question, answer."
    )
    gone = the_problem(**data, data__rename_columns={"question": "prompt", "answer": "reply"})
    assert gone.field == "rewards"
    assert "the dataset has prompt, reply" in gone.message


@pytest.mark.parametrize("evaluation, field, sentence", [
    ({"source": "/nowhere/held_out.jsonl"}, "evaluation.source", "There is no file /nowhere/held_out.jsonl"),
    ({"source": "reasoning_gym:product"}, "evaluation.source", "reasoning-gym has no task 'product'"),
    ({"source": "reasoning_gym:countdown"}, "data.options", "countdown has no option"),
    ({"source": "HERE"}, "evaluation.source", "has no 'prompt' column; its columns are: question, answer"),
    ({"source": "HERE", "rename_columns": {"question": "prompt", "answer": "reply"}}, "evaluation.source",
     "In evaluation the reward last_number_match needs the column 'answer'"),
])  # fmt: skip
def test_the_dataset_of_evaluation_is_checked_as_that_of_training(
    tmp_path: Path, evaluation: dict[str, Any], field: str, sentence: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n')
    if evaluation["source"] == "HERE":
        evaluation = evaluation | {"source": str(path)}
    problem = the_problem(evaluation=spec_with().evaluation.model_dump() | {"every_steps": 5} | evaluation)
    assert problem.field == field
    assert sentence in problem.message


def test_what_is_wrong_with_both_datasets_is_said_once() -> None:
    assert "must be >=" in the_problem(
        data__options={"min_digits": 5, "max_digits": 2}, evaluation=spec_with().evaluation.model_dump() | {"every_steps": 5}
    ).message  # fmt: skip


def test_tools_and_environments_are_checked() -> None:
    tool = the_problem(agent__tools=["calculater"])
    assert tool.field == "agent.tools"
    assert "there are calculator" in tool.message
    elsewhere = Host.objects.create(name="elsewhere", last_seen_at=timezone.now())
    Device.objects.create(host=elsewhere, uuid="cpu:elsewhere", kind="cpu", name="2 cores")
    assert checks.check_spec(spec_with(agent__tools=["calculater"]), None) == []  # it may be installed there
    options = the_problem(agent__environment="guess_number", agent__environment_options={"lo": 1})
    assert options.field == "agent.environment"
    assert "'lo'" in options.message
    assert checks.check_spec(spec_with(agent__tools=["calculator"], agent__environment="guess_number"), None) == []
