"""The programs of docs/customising.md, as they stand there."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest

from tests.trainer_core.rollout.conftest import MakeTrainer
from tests.trainer_core.rollout.mini_trainer import config_for
from trainer_core.rollout.environments import environment_tools
from trainer_core.rollout.worker import RolloutWorker

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "customising.md"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The classes and functions of the document, in a module that can be imported."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    kept = [re.sub(r"^(trainer|args) = .*\n", "", block, flags=re.MULTILINE) for block in blocks]
    (tmp_path / "customised.py").write_text("\n\n".join(kept))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("customised")
    del sys.modules["customised"]


def solved_when_odd(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float]:
    return [1.0 + index if row % 2 else float(index == 0) for index, row in enumerate(number)]


def test_the_curriculum_leaves_out_what_is_solved(make: MakeTrainer, programs: ModuleType) -> None:
    trainer = make(
        rows=6, rewards=[solved_when_odd], loop_cls=programs.CurriculumTrainer.loop_cls,
        config_cls=programs.CurriculumConfig, max_staleness=0,
    )  # fmt: skip
    trainer.run(lambda t: t.train(8))
    assert {message.reason for message in trainer.dropped} == {"filtered"}
    assert {message.row_index % 2 for message in trainer.dropped} == {1}
    assert all(sample.row_index % 2 == 0 for sample in trainer.samples if sample.epoch >= 1)
    assert set(trainer.trained.values()) == {1}


def test_the_reward_of_the_document_scores(make: MakeTrainer, programs: ModuleType) -> None:
    rows = [{"prompt": [{"role": "user", "content": "q"}], "answer": "a"}] * 6
    trainer = make(rows=datasets.Dataset.from_list(rows), rewards=[programs.shorter_is_better], max_staleness=0)
    trainer.run(lambda t: t.train(1))
    assert len({sample.reward for sample in trainer.samples}) > 1
    assert not trainer.events


def test_what_the_document_shows_can_be_sent_to_the_worker(programs: ModuleType, tmp_path: Path) -> None:
    worker = RolloutWorker(
        config=config_for("http://127.0.0.1:9", tmp_path, config_cls=programs.CurriculumConfig), model_path="none",
        loop_cls=programs.CurriculumRolloutLoop, train_dataset=[{}], reward_funcs=[solved_when_odd], reward_weights=[1.0],
        tools=[programs.weather], environment_factory=programs.Guessing, rollouts_path=None, state=None,
    )  # fmt: skip
    worker.check_picklable()


def test_the_game_plays(programs: ModuleType) -> None:
    game = programs.Guessing()
    game.reset(number=4, prompt="p")
    guess = environment_tools(game)["guess"]
    assert [guess(number=tried) for tried in (2, 7, 4)] == ["higher", "lower", "found"]
    assert game.get_reward() == pytest.approx(1 / 3)
