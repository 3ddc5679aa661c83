"""The best checkpoint by an evaluation metric: saved when it is found, and kept beside the newest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_core.training.conftest import reward
from tests.trainer_core.training.replay import ReplayWorker, make_group, prompts
from trainer_core import evaluation
from trainer_core.config import AsyncGRPOConfig
from trainer_core.trainer import AsyncGRPOTrainer

REWARDS = {1: math.nan, 2: 0.2, 3: 0.9, 4: 0.5, 5: 0.9, 6: 0.1}


@pytest.mark.usefixtures("make_trainer")
def test_the_best_is_saved_out_of_turn_and_kept(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(worker: Any, intake: Any, step: int, event: Callable[..., None]) -> dict[str, float]:
        return {"eval/reward": REWARDS[step], "eval/pass@1": 0.0, "eval/pass@k": 0.0, "eval/duration_s": 0.1}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    ReplayWorker.samples = [sample for row in range(12) for sample in make_group(row)]
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path / "run"), num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        token_budget=0, max_steps=6, bf16=False, disable_tqdm=True, use_cpu=True, eval_steps=1, save_steps=2,
        save_strategy="steps", save_total_limit=1, max_staleness=100, metric_for_best_model="eval/reward",
    )  # fmt: skip
    AsyncGRPOTrainer(str(tiny_llama), reward, args, prompts(100), eval_dataset=prompts(2)).train()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    for step in (3, 6):
        state = json.loads((tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert (state["best_metric"], state["best_global_step"]) == (0.9, 3)
        assert state["best_model_checkpoint"] == str(tmp_path / "run" / "checkpoint-3")
    lines = [json.loads(line) for line in (tmp_path / "run" / "spool.jsonl").read_text().splitlines()]
    best = [line["data"]["step"] for line in lines if line["kind"] == "event" and line["name"] == "best"]
    assert best == [2, 3], "neither NaN nor an equal value is better"


@pytest.mark.usefixtures("make_trainer")
def test_the_start_is_evaluated_where_that_is_asked_for(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[tuple[int, int]] = []

    def evaluate(worker: Any, intake: Any, step: int, event: Callable[..., None]) -> dict[str, float]:
        evaluated.append((step, worker.state.weight_version))
        return {"eval/reward": 1.0 - step, "eval/duration_s": 0.1}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    ReplayWorker.samples = [sample for row in range(12) for sample in make_group(row)]

    def train(max_steps: int, resume: bool) -> None:
        args = AsyncGRPOConfig(
            output_dir=str(tmp_path / "run"), num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            token_budget=0, max_steps=max_steps, bf16=False, disable_tqdm=True, use_cpu=True, eval_steps=2, save_steps=2,
            eval_at_start=True,
        )  # fmt: skip
        AsyncGRPOTrainer(str(tiny_llama), reward, args, prompts(100), eval_dataset=prompts(2)).train(resume or None)

    train(2, resume=False)
    assert evaluated == [(0, 0), (2, 2)]
    train(4, resume=True)
    assert evaluated[2:] == [(4, 4)]
    lines = map(json.loads, (tmp_path / "run" / "spool.jsonl").read_text().splitlines())
    found = [(line["step"], line["values"]["eval/reward"]) for line in lines if "eval/reward" in line.get("values", {})]
    assert found == [(0, 1.0), (2, -1.0), (4, -3.0)]
