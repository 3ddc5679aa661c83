"""What is checked and laid out on the host before anything expensive starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.conftest import Studio
from trainer_core.spec import RunSpec


@pytest.fixture
def attempt(make_run: Callable[..., Any]) -> Any:
    return make_run().current_attempt


def no_tick(_: str) -> None:
    pytest.fail("nothing had to be waited for")


def test_the_folder_holds_the_spec_and_the_rewards(studio: Studio, make_run: Callable[..., Any]) -> None:
    from webapp.accounts.models import User
    from webapp.rewards.models import RewardFunction, RewardVersion
    from workers.preparation import CannotStart, prepare_folder

    run = make_run(rewards=[{"name": "greeting", "version": 2}, {"name": "last_number_match"}])
    attempt, owner = run.current_attempt, User.objects.get()
    function = RewardFunction.objects.create(name="greeting", owner=owner)
    RewardVersion.objects.create(function=function, number=1, source="old", created_by=owner)
    with pytest.raises(CannotStart, match="Version 2 of the reward function greeting does not exist"):
        prepare_folder(attempt, run.run_spec())
    RewardVersion.objects.create(function=function, number=2, source="def greeting(): 'ä'", created_by=owner)
    prepare_folder(attempt, run.run_spec())
    assert RunSpec.from_yaml((run.folder / "spec.yaml").read_text(encoding="utf-8")) == run.run_spec()
    assert [path.name for path in (run.folder / "rewards").iterdir()] == ["greeting-v2.py"]
    assert (run.folder / "rewards" / "greeting-v2.py").read_text(encoding="utf-8") == "def greeting(): 'ä'"
    assert attempt.folder.is_dir()


def test_a_folder_that_can_not_be_written_is_told(studio: Studio, attempt: Any) -> None:
    from workers.preparation import CannotStart, prepare_folder

    (studio.home / "runs").write_text("a file in the place of the folder")
    with pytest.raises(CannotStart, match="can't be written: Not a directory"):
        prepare_folder(attempt, attempt.run.run_spec())


def test_a_checkpoint_that_is_gone_is_told(studio: Studio, attempt: Any) -> None:
    from django.utils import timezone

    from webapp.checkpoints.models import Checkpoint
    from workers.preparation import CannotStart, check_inputs

    spec = attempt.run.run_spec()
    assert check_inputs(attempt, spec) is None
    attempt.resumed_from = Checkpoint.objects.create(
        run=attempt.run, attempt=attempt, step=12, kind="adapter", created_at=timezone.now()
    )
    with pytest.raises(CannotStart, match="The checkpoint of step 12 is not on this host"):
        check_inputs(attempt, spec)
    attempt.resumed_from.folder.mkdir(parents=True)
    assert check_inputs(attempt, spec) == attempt.run.folder / "checkpoints" / "checkpoint-12"


def test_models_are_found_or_their_lack_is_told(studio: Studio, model: Path, attempt: Any) -> None:
    from workers.preparation import CannotStart, find_model

    def find(path: str) -> Path:
        spec = attempt.run.run_spec()
        return find_model(
            spec.model_copy(update={"model": spec.model.model_copy(update={"path": path})}), model, no_tick
        )

    assert find(str(model)) == model
    (model / "model.safetensors").unlink()
    with pytest.raises(CannotStart, match="holds no weights"):
        find(str(model))
    with pytest.raises(CannotStart, match=r"has no config\.json"):
        find(str(studio.home))
    with pytest.raises(CannotStart, match="The built-in model smollm2-135m-instruct is not ready"):
        find("smollm2-135m-instruct")
    with pytest.raises(CannotStart, match="neither a folder on this host nor a hub id"):
        find("--help")


def test_a_hub_model_is_taken_from_the_cache(
    studio: Studio, attempt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is laid out as the hub's client does it; what is not in it can't be had offline, and is told."""
    from huggingface_hub import constants

    from workers import preparation

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commit = "0" * 40
    snapshot = tmp_path / "cache" / "models--acme--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    refs = tmp_path / "cache" / "models--acme--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    spec = attempt.run.run_spec()

    def find(name: str) -> Path:
        named = spec.model_copy(update={"model": spec.model.model_copy(update={"path": name})})
        return preparation.find_model(named, tmp_path, lambda _: None)

    assert find("acme/tiny") == snapshot
    with pytest.raises(preparation.CannotStart, match="acme/other is not on this host and could not be downloaded"):
        find("acme/other")


def test_a_control_file_is_whole_or_not_there(tmp_path: Path) -> None:
    from workers.preparation import write_atomically

    path = tmp_path / "control"
    for text in ("stop_and_save", "stop"):
        write_atomically(path, text)
        assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["control"]


def test_a_fork_starts_from_its_copy_of_the_weights_and_says_when_they_are_not_here(attempt: Any) -> None:
    from workers.launching import TrainerPlan, train_command
    from workers.preparation import CannotStart, starting_weights

    assert starting_weights(attempt) is None
    attempt.run.forked_step = 20
    with pytest.raises(CannotStart, match="weights of step 20 that this run was forked from are not on this host"):
        starting_weights(attempt)
    attempt.run.starting_weights.mkdir(parents=True)
    start = starting_weights(attempt)
    assert start == attempt.run.folder / "start"
    plan = TrainerPlan(attempt.run.folder, attempt.folder, Path("/m"), ["http://s"], None, 1, None, start=start)
    assert train_command(plan).argv[-2:] == ["--start-from", str(start)]
    resumed = TrainerPlan(
        attempt.run.folder, attempt.folder, Path("/m"), ["http://s"], Path("/c"), 1, None, start=start
    )
    assert train_command(resumed).argv[-2:] == ["--resume", "/c"]
