"""Training datasets that give their rows only one after another."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.trainer_core.rollout.conftest import MakeTrainer, prompts
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from trainer_core.checks import check_arguments
from trainer_core.config import AsyncGRPOConfig
from trainer_core.rollout.datasets import load_prompts
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.streams import StreamFailure, first_row, is_stream, rows_in, stream_rows
from trainer_core.spec import DataSpec, RunSpec


def numbered(count: int, wait_s: float = 0.0) -> Iterator[dict[str, Any]]:
    for number in range(count):
        time.sleep(wait_s)
        yield {"prompt": [{"role": "user", "content": f"row {number}"}], "number": number}


def stream(count: int, wait_s: float = 0.0) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(numbered, gen_kwargs={"count": count, "wait_s": wait_s})


def read(rows: Any, count: int, **options: Any) -> list[tuple[int, int, int]]:
    """Epoch, place and number of the first rows."""

    settings: dict[str, Any] = {"seed": 3, "shuffle": False, "deadline_s": 30, **options}

    async def take() -> list[tuple[int, int, int]]:
        found = []
        async for epoch, place, row in stream_rows(rows, **settings):
            found.append((epoch, place, row["number"]))
            if len(found) == count:
                break
        return found

    return asyncio.run(take())


def test_epoch_after_epoch_in_order_or_shuffled() -> None:
    assert read(stream(3), 7) == [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 0, 0)]
    shuffled = read(stream(20), 40, shuffle=True)
    orders = [[number for epoch, _, number in shuffled if epoch == wanted] for wanted in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1] != list(range(20))
    assert shuffled == read(stream(20), 40, shuffle=True)


def breaks() -> Iterator[dict[str, Any]]:
    yield from numbered(2)
    raise OSError("connection lost")


@pytest.mark.parametrize(
    "rows, text",
    [
        (datasets.IterableDataset.from_generator(numbered, gen_kwargs={"count": 0}), "has no rows"),
        (datasets.IterableDataset.from_generator(breaks), "failed .*connection lost"),
        (stream(5, wait_s=30.0), "gave no row for 0 s"),
    ],
)
def test_a_stream_that_ends_badly_is_a_sentence(rows: Any, text: str) -> None:
    with pytest.raises(StreamFailure, match=text):
        read(rows, 5, deadline_s=0.2 if "no row for" in text else 30)


def test_a_run_of_a_stream_and_what_a_resumed_one_says(make: MakeTrainer) -> None:
    """The order is the stream's; an epoch is over when it is; a resumed run begins anew and says so."""
    trainer = make(rows=stream(6), max_staleness=0, train_sampling_strategy="sequential")
    trainer.run(lambda t: t.train(4))
    assert sorted(trainer.trained) == [(0, row) for row in range(6)] + [(1, 0), (1, 1)]
    assert {sample.row_index for sample in trainer.samples[:8]} == {0, 1}
    assert not trainer.events
    resumed = make(rows=stream(6), max_staleness=0, train_sampling_strategy="sequential",
                   state=RolloutState.from_json(trainer.state.to_json()))  # fmt: skip

    async def again(trainer: MiniTrainer) -> None:
        trainer.push(trainer.state.weight_version)
        await trainer.train(1)

    resumed.run(again)
    assert sorted(resumed.trained) == [(0, 0), (0, 1)]
    assert [event.name for event in resumed.events] == ["stream_restarted"]


def test_files_are_streamed_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {n}", "answer": n}) + "\n" for n in range(3)))
    rows = load_prompts(DataSpec(source=str(path), streaming=True, prompt_suffix="now"))
    assert is_stream(rows)
    assert rows_in(rows) == float("inf")
    assert list(rows)[2] == {"prompt": [{"role": "user", "content": "say 2 now"}], "answer": 2}
    path.write_text('{"question": "q"}\n')
    with pytest.raises(ValueError, match="has no 'prompt' column; found question"):
        load_prompts(DataSpec(source=str(path), streaming=True))
    with pytest.raises(ValueError, match="does not exist on the training host"):
        load_prompts(DataSpec(source=str(tmp_path / "none.jsonl"), streaming=True))
    with pytest.raises(ValueError, match="a reasoning-gym task is generated"):
        DataSpec(streaming=True)


def test_what_the_trainer_needs_of_a_stream(tmp_path: Path) -> None:
    def check(rows: Any, **options: Any) -> None:
        config = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
        check_arguments("model", None, rows, None, config)

    check(stream(3), max_steps=5)
    check(prompts(3))
    with pytest.raises(ValueError, match="set max_steps to say when training ends"):
        check(stream(3))
    with pytest.raises(ValueError, match="no 'prompt' column; found text"):
        check(prompts(3).rename_column("prompt", "text").to_iterable_dataset(), max_steps=5)
    with pytest.raises(TypeError, match=r"is a list; a datasets\.Dataset or IterableDataset is needed"):
        check([1], max_steps=5)
    assert first_row(prompts(0)) is None


def test_the_best_checkpoint_needs_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_best_by is eval/reward, but nothing is evaluated"):
        RunSpec.model_validate({"checkpoints": {"keep_best_by": "eval/reward"}})
    with pytest.raises(ValueError, match="metric_for_best_model is 'eval_reward', but nothing is evaluated"):
        AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, metric_for_best_model="eval/reward")
    with pytest.raises(ValueError, match="allowed are eval_reward, eval_pass@1, eval_pass@k"):
        AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, metric_for_best_model="loss", eval_steps=2)
