"""Evaluation in the loop and in the trainer: right numbers, of one policy, and no trace in training."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_core.rollout.conftest import MakeTrainer, first_token, prompts
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout.evaluation import pass_rates
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.sampling import Sampling
from trainer_core.rollout.state import prompt_order
from trainer_core.spec import RunSpec

EVAL_OFFSET = 1000


def eval_rows(count: int) -> Any:
    rows = [{"prompt": [{"role": "user", "content": f"eval {i}"}], "number": EVAL_OFFSET + i} for i in range(count)]
    return type(prompts(1)).from_list(rows)


def graded(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float | None]:
    """Random for training; for evaluation row 0 fails, row 1 passes, row 2 half passes, row 3 is not scored."""
    if number[0] < EVAL_OFFSET:
        return [float(ids[0]) for ids in completion_ids]
    grades: list[list[float | None]] = [[0.0], [1.0], [0.0, 3.0], [None]]
    kinds = grades[number[0] - EVAL_OFFSET]
    return [kinds[index % len(kinds)] for index in range(len(number))]


def test_an_evaluation_counts_each_prompt_and_leaves_out_what_has_no_score(make: MakeTrainer) -> None:
    trainer = make(rewards=[graded], eval_rows=eval_rows(4), eval_num_generations=2)
    trainer.run(lambda t: t.evaluate(3))
    (done,) = trainer.evaluations
    assert done.values == {
        "eval/reward": (0 + 0 + 1 + 1 + 0 + 3) / 6, "eval/pass@1": 0.5, "eval/pass@2": 2 / 3, "eval/pass@k": 2 / 3
    }  # fmt: skip
    assert (done.step, done.rollouts, done.unscored) == (3, 8, 2)
    lines = [json.loads(line) for line in trainer.rollouts_path.read_text().splitlines()]  # type: ignore[union-attr]
    stored = [line["rollout"] for line in lines if "evaluation" in line["rollout"]]
    assert Counter((line["row_index"], line["epoch"], line["evaluation"]) for line in stored) == {
        (row, -1, 3): 2 for row in (-1, -2, -3, -4)
    }
    assert sorted((line["row_index"], line["reward"]) for line in stored if line["row_index"] > -4) == [
        (-3, 0.0), (-3, 3.0), (-2, 1.0), (-2, 1.0), (-1, 0.0), (-1, 0.0)
    ]  # fmt: skip


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_order_of_training_prompts_is_the_same(make: MakeTrainer, server: StubServer, evaluates: bool) -> None:
    """With and without evaluations groups are dispatched in the order that seed and epoch give, and trained once."""
    server.delay_s = 0.005
    dispatched: list[tuple[int, int]] = []

    class Watched(AsyncRolloutLoop):
        def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
            dispatched.append((epoch, row_index))
            return True

    trainer = make(rows=8, eval_rows=eval_rows(3), rewards=[first_token], max_staleness=2, loop_cls=Watched)

    async def body(trainer: MiniTrainer) -> None:
        for step in range(1, 9):
            await trainer.train(1)
            if evaluates and step % 2 == 0:
                await trainer.evaluate(step)

    trainer.run(body)
    expected = [(epoch, int(row)) for epoch in range(4) for row in prompt_order(8, trainer.config.seed, epoch)]
    assert dispatched[:16] == expected[:16]
    assert set(trainer.trained.values()) == {1}
    assert len(trainer.evaluations) == (4 if evaluates else 0)


def test_an_evaluation_uses_the_policy_of_its_step_and_waits_for_a_lost_server(
    make: MakeTrainer, server: StubServer, tiny_model: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    trainer = make(eval_rows=eval_rows(5), rewards=[first_token], max_staleness=0)
    server.delay_s = 0.05

    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(2)
        server.down = True
        evaluation = asyncio.create_task(trainer.evaluate(2))
        while not trainer.lost:
            await asyncio.sleep(0.02)
        server.down = False
        await evaluation

    trainer.run(body)
    asked = [body for body in server.requests if "eval" in tokenizer.decode(body["prompt"])]
    assert {body["model"] for body in asked} == {"policy-v2"}
    assert trainer.evaluations[0].rollouts == 5
    assert trainer.evaluations[0].unscored == 0
    assert set(trainer.trained.values()) == {1}


def broken(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float]:
    if number[0] >= EVAL_OFFSET:
        raise KeyError("gold")
    return [float(ids[0]) for ids in completion_ids]


def test_what_cannot_be_scored_is_counted_and_said(make: MakeTrainer) -> None:
    trainer = make(eval_rows=eval_rows(3), rewards=[broken])
    trainer.run(lambda t: t.evaluate(1))
    (done,) = trainer.evaluations
    assert (done.values, done.rollouts, done.unscored) == ({}, 3, 3)
    assert any("failed on an evaluation prompt: KeyError: 'gold'" in event.text for event in trainer.events)


@given(st.lists(st.lists(st.floats(-2, 2), max_size=5), max_size=6))
def test_pass_rates(rewards: list[list[float]]) -> None:
    found = pass_rates([np.array(values) for values in rewards])
    kept = [values for values in rewards if values]
    if not kept:
        assert found == {}
        return
    flat = [value for values in kept for value in values]
    assert found["eval/reward"] == pytest.approx(sum(flat) / len(flat))
    passed = [[value > 0 for value in values] for values in kept]
    assert found["eval/pass@1"] == pytest.approx(sum(sum(values) / len(values) for values in passed) / len(passed))
    assert found["eval/pass@k"] == pytest.approx(sum(any(values) for values in passed) / len(passed))
    assert found["eval/pass@1"] <= found["eval/pass@k"] + 1e-12


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 2))
def test_estimates_are_the_mean_over_all_draws(rewards: list[list[int]], above: int) -> None:
    """pass@k against every way to draw k of a prompt's rollouts."""
    found = pass_rates([np.array(values, float) for values in rewards], above)
    for k in (2, 4):
        draws = [
            np.mean([max(drawn) > above for drawn in combinations(values, k)]) for values in rewards if len(values) >= k
        ]
        assert found.get(f"eval/pass@{k}") == (pytest.approx(np.mean(draws)) if draws else None)
    assert "eval/pass@8" not in found
    assert found["eval/pass@k"] == pytest.approx(np.mean([max(values) > above for values in rewards]))


def test_an_evaluation_samples_its_own_way(make: MakeTrainer, server: StubServer, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    trainer = make(eval_rows=eval_rows(3), rewards=[first_token], eval_temperature=0.0, eval_top_p=0.7,
                   eval_pass_above=1e9, temperature=0.8)  # fmt: skip

    async def steps(trainer: MiniTrainer) -> None:
        await trainer.train(1)
        await trainer.evaluate(1)

    trainer.run(steps)
    asked: dict[bool, set[tuple[float, float]]] = {True: set(), False: set()}
    for body in server.requests:
        asked["eval" in tokenizer.decode(body["prompt"])].add((body["temperature"], body["top_p"]))
    assert asked == {True: {(0.0, 0.7)}, False: {(0.8, 1.0)}}
    assert Sampling(top_k=5, top_log_probs=8).of_evaluation(trainer.config) == Sampling(0.0, 0.7, 5, top_log_probs=0)
    assert trainer.evaluations[0].values["eval/pass@1"] == 0.0


def spec(**sections: Any) -> RunSpec:
    return RunSpec.model_validate({"data": {"source": "reasoning_gym:chain_sum"}, **sections})


def test_the_spec_says_what_is_evaluated() -> None:
    assert spec().evaluation_data() is None
    data = spec(data={"source": "reasoning_gym:chain_sum", "options": {"min_terms": 2}}, evaluation={"every_steps": 5})
    found = data.evaluation_data()
    assert found is not None
    assert (found.source, found.size, found.seed, found.options) == (
        "reasoning_gym:chain_sum",
        50,
        4242,
        {"min_terms": 2},
    )
    with pytest.raises(ValueError, match=r"evaluation\.source is empty; name a dataset"):
        spec(data={"source": "rows.jsonl"}, evaluation={"every_steps": 5})
    with pytest.raises(ValueError, match=r"evaluation\.seed is 42, as data.seed"):
        spec(evaluation={"every_steps": 5, "seed": 42})
    with pytest.raises(ValueError, match=r"not a multiple of training\.weight_sync_steps 2"):
        spec(evaluation={"every_steps": 5}, training={"weight_sync_steps": 2})
