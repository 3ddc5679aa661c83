"""Runs that use tools and environments, whole: the trainer, the worker process, and the real server with a model that calls.

Tools and environments keep accounts of their own, in files; what the run reports must agree with them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import httpx
import pytest

from tests.trainer_core.rollout import skilled_model
from trainer_core import AsyncGRPOConfig, AsyncGRPOTrainer, AsyncRolloutLoop, Rollout
from trainer_core.metrics import METRICS, describe, reduce
from trainer_core.report import StepReport

if TYPE_CHECKING:
    from tests.vllm_server import RunningServer

# The first use teaches the model and starts a server, which a machine with much else to do takes minutes for.
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1500)]


def note(kind: str, **values: Any) -> None:
    """One line in the accounts of the tool's side, which the run knows nothing of."""
    line = json.dumps({"kind": kind, "at": time.time(), **values}) + "\n"
    descriptor = os.open(os.environ["OFFBEAT_TEST_ACCOUNTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def calculator(expression: str) -> str:
    """Works out a sum.

    Args:
        expression: Such as 1 + 2.
    """
    started = time.perf_counter()
    failed = True
    try:
        result = skilled_model.calculator(expression)
        failed = False
        return result
    finally:
        note("call", tool="calculator", failed=failed, seconds=time.perf_counter() - started)


class Guessing:
    """A number from 0 to 9 is to be found; a find is worth 1, every guess costs a tenth."""

    def reset(self, number: int, **row: Any) -> None:
        self.number, self.guesses, self.found = number, 0, False
        note("reset", number=number)

    async def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: From 0 to 9.
        """
        self.guesses += 1
        self.found = self.found or number == self.number
        note("call", tool="guess", failed=False, seconds=0.0)
        return "found" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        reward = float(self.found) - 0.1 * self.guesses
        note("reward", reward=reward)
        return reward


class OneEpoch(AsyncRolloutLoop):
    """Generates the first epoch and nothing of a second, so that accounts can be closed.

    The rollouts of the second never end; the run has places enough for an evaluation beside them.
    """

    async def generate_one(self, row_index: int, row: dict[str, Any], epoch: int) -> Rollout:
        if epoch > 0:
            await asyncio.Event().wait()
        return await super().generate_one(row_index, row, epoch)


class OneEpochTrainer(AsyncGRPOTrainer):
    loop_cls = OneEpoch


async def solved(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for the right last line, and a little for short conversations, so that groups differ."""
    return [
        float((talk[-1]["content"] or "").strip() == right) - 0.01 * len(talk)
        for talk, right in zip(completions, answer, strict=True)
    ]


async def nothing(completions: list[Any], **columns: Any) -> list[None]:
    """Leaves the scoring to the environment."""
    return [None] * len(completions)


@pytest.fixture(scope="module")
def skilled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    from tests.vllm_server import running_server, tiny_spec

    with running_server(
        tiny_spec(), skilled_model.skilled_model(), tmp_path_factory.mktemp("skilled") / "log"
    ) as server:
        yield server


class Run:
    """A run that is over: what it reported, and the accounts of its tools."""

    def __init__(self, folder: Path, raw: dict[str, list[Any]]) -> None:
        self.raw = raw
        lines = [json.loads(line) for line in (folder / "spool.jsonl").read_text().splitlines()]
        metrics = [line for line in lines if line["kind"] == "metrics"]
        self.steps = [line["values"] for line in metrics if "loss" in line["values"]]
        self.evaluations = {line["step"]: line["values"] for line in metrics if "eval/reward" in line["values"]}
        self.reported = [line["values"] for line in metrics]
        self.events = [line for line in lines if line["kind"] == "event"]
        stored = (folder / "rollouts.jsonl").read_text().splitlines()
        everything = [json.loads(line) for line in stored if json.loads(line)["kind"] == "rollout"]
        self.rollouts = [line["rollout"] for line in everything if "evaluation" not in line["rollout"]]
        self.evaluated = [line["rollout"] for line in everything if "evaluation" in line["rollout"]]
        self.generated_until = max(line["t"] for line in everything if "evaluation" not in line["rollout"])
        self.accounts = [json.loads(line) for line in (folder / "accounts").read_text().splitlines()]

    def kept(self, kind: str) -> list[dict[str, Any]]:
        """The accounts of training; an evaluation comes after the last rollout was stored."""
        return [line for line in self.accounts if line["kind"] == kind and line["at"] <= self.generated_until]

    def total(self, name: str) -> float:
        """A total over the whole run, all of which was reported: what came after the last step, too."""
        total = sum(self.raw.get(name, []))
        assert sum(values.get(name, 0.0) for values in self.reported) == pytest.approx(total)
        return total

    def overall(self, name: str) -> float:
        """A mean or ratio over the whole run, from what the steps were reduced from."""
        return reduce(name, self.raw[name])


@pytest.fixture
def train(skilled_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trains two steps of one epoch and gives a Run; afterwards the server has its first weights again."""
    import torch

    torch.set_num_threads(1)
    monkeypatch.setenv("OFFBEAT_TEST_ACCOUNTS", str(tmp_path / "accounts"))
    raw: dict[str, list[Any]] = {}
    add = StepReport.add

    def record(self: StepReport, name: str, value: Any) -> None:
        raw.setdefault(name, []).append(value)
        add(self, name, value)

    monkeypatch.setattr(StepReport, "add", record)

    def run(
        rows: list[dict[str, Any]], reward: Any, evaluation: list[dict[str, Any]] | None = None, **parts: Any
    ) -> Run:
        args = AsyncGRPOConfig(
            output_dir=str(tmp_path), vllm_server_base_url=skilled_server.url, num_train_epochs=1, num_generations=8,
            per_device_train_batch_size=len(rows) * 4, gradient_accumulation_steps=1, token_budget=0, max_staleness=0,
            max_completion_length=96, max_tool_calling_iterations=2, learning_rate=1e-5, bf16=False, use_cpu=True,
            disable_tqdm=True, save_strategy="no", max_concurrent_rollouts=64, eval_num_generations=2,
            eval_steps=None if evaluation is None else 2,
        )  # fmt: skip
        trainer = OneEpochTrainer(
            str(skilled_server.model_path), reward, args, datasets.Dataset.from_list(rows),
            eval_dataset=None if evaluation is None else datasets.Dataset.from_list(evaluation), **parts,
        )  # fmt: skip
        trainer.train()
        return Run(tmp_path, raw)

    yield run
    restore(skilled_server)


def restore(server: RunningServer) -> None:
    """Give the server its first weights again."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(server.model_path)}}
    httpx.post(f"{server.url}/collective_rpc", json=body, timeout=60).raise_for_status()


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Chain sums of two digits, as reasoning-gym makes them."""
    from trainer_core.rollout.datasets import load_prompts
    from trainer_core.spec import DataSpec

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = DataSpec(source="reasoning_gym:chain_sum", size=count, seed=seed, options=options)
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in load_prompts(data)]


def check_conversations(run: Run) -> None:
    """Metrics of rollouts, completions and tools against the stored conversations."""
    talks = [rollout["completion"] for rollout in run.rollouts]
    said = [[message for message in talk if message["role"] == "assistant"] for talk in talks]
    results = [message for talk in talks for message in talk if message["role"] == "tool"]
    turns = [rollout["turns"] for rollout in run.rollouts]
    tokens = [rollout["tokens"] for rollout in run.rollouts]
    assert turns == [len(messages) for messages in said]
    assert run.overall("rollout/turns_mean") == pytest.approx(sum(turns) / len(turns))
    assert run.overall("rollout/turns_max") == max(turns)
    assert run.overall("completions/mean_length") == pytest.approx(sum(tokens) / len(tokens))
    assert (run.overall("completions/min_length"), run.overall("completions/max_length")) == (min(tokens), max(tokens))
    cut = sum(rollout["finish_reason"] == "length" for rollout in run.rollouts)
    assert run.overall("completions/clipped_ratio") == pytest.approx(cut / len(turns))
    seconds = [rollout["duration_s"] for rollout in run.rollouts]
    assert run.overall("rollout/duration_s") == pytest.approx(sum(seconds) / len(seconds), abs=0.01)
    # tools, by what the model was answered
    assert run.overall("tools/call_frequency") == pytest.approx(len(results) / len(talks))
    calling = [[m for m in messages if m.get("tool_calls")] for messages in said]
    answered = sum(len(talk) > index + 1 and talk[index + 1]["role"] == "tool" for talk in talks for index in range(len(talk))
                   if talk[index]["role"] == "assistant")  # fmt: skip
    assert run.overall("tools/parallel_calls_mean") == pytest.approx(len(results) / answered)
    wrong = sum(message["content"].startswith("Error: ") for message in results)
    assert run.overall("tools/failure_frequency") == pytest.approx(wrong / len(results))
    assert run.total("tools/unknown_name_total") == sum("there is no tool" in message["content"] for message in results)
    exhausted = sum(
        bool(talk[-1].get("tool_calls")) and len(calls) == 3 for talk, calls in zip(talks, calling, strict=True)
    )
    assert run.overall("tools/loop_exhausted_frac") == pytest.approx(exhausted / len(talks))
    # no rollout twice, and one sequence for each: the template only adds
    assert len({rollout["rollout_id"] for rollout in run.rollouts}) == len(run.rollouts)
    assert run.overall("rollout/samples_per_rollout") == 1
    assert run.overall("rollout/fork_frac") == run.overall("rollout/realign_frac") == 0


def check_stages(run: Run, *stages: str) -> None:
    """Everything that the metric table has of these stages was recorded by this run, and nothing that it does not have."""
    assert [name for name in run.raw if describe(name) is None] == []
    declared = {metric.name for metric in METRICS if metric.stage in stages and "<" not in metric.name}
    assert declared - set(run.raw) == set()


def check_training(run: Run, rows: int) -> None:
    """The run trained on what is stored, with the server's probabilities."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for rollout in run.rollouts:
        groups.setdefault(rollout["group_id"], []).append(rollout)
    assert Counter(len(group) for group in groups.values()) == {8: rows}
    assert sorted({rollout["row_index"] for rollout in run.rollouts}) == list(range(rows))
    trained = [rollout for rollout in run.rollouts if rollout["dropped"] is None]
    assert sum(values["batch/samples_per_step"] for values in run.steps) == len(trained)
    assert run.total("batch/trained_tokens_per_step") == sum(rollout["tokens"] for rollout in trained)
    assert run.total("rollout/dropped_groups_total") == sum(
        group[0]["dropped"] in ("zero_variance", "unscorable") for group in groups.values()
    )
    assert run.steps[0]["sampling/step0_max_abs_diff"] < 1e-3, "tokens or masks are not those that were sampled"
    assert run.steps[-1]["epoch"] == 1 or run.rollouts[-1]["dropped"]
    assert all(values["grad_norm"] > 0 for values in run.steps)


def test_a_run_with_a_calculator(train: Any) -> None:
    rows = sums(6, seed=1)
    run = train(rows, solved, evaluation=sums(5, seed=2), tools=[calculator])
    calls = run.kept("call")
    assert len(calls) > 20
    assert run.total("tools/calculator/call_total") == len(calls)
    failed = sum(line["failed"] for line in calls)
    assert run.total("tools/calculator/failure_total") == failed > 0
    spent = sum(line["seconds"] for line in calls) / len(calls)
    assert spent < run.overall("tools/calculator/latency_s") < spent + 5
    assert len(run.raw["tools/calculator/latency_s"]) == len(calls)
    check_conversations(run)
    check_training(run, len(rows))
    check_stages(run, "rollout", "completions", "tools", "server")
    assert [
        event["name"] for event in run.events if event["name"] in ("reward_error", "rollout_failed", "failed")
    ] == []
    found = run.evaluations[2]
    assert len(run.accounts) > len(calls), "the evaluation used the tool, and is not counted as training"
    assert 0 <= found["eval/pass@1"] <= found["eval/pass@k"] <= 1
    assert -0.1 <= found["eval/reward"] <= 1
    assert [event["step"] for event in run.events if event["name"] == "evaluated"] == [2]
    assert [rollout["evaluation"] for rollout in run.evaluated] == [2] * 10
    assert Counter(rollout["row_index"] for rollout in run.evaluated) == dict.fromkeys(range(-5, 0), 2)
    rewards = [rollout["reward"] for rollout in run.evaluated]
    assert sum(rewards) / len(rewards) == pytest.approx(found["eval/reward"])


def test_a_run_in_a_text_game(train: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": skilled_model.GAME}], "number": number} for number in (1, 4, 6, 8)]
    run = train(rows, nothing, environment_factory=Guessing)
    calls, resets, rewards = run.kept("call"), run.kept("reset"), run.kept("reward")
    assert len(resets) == len(rewards) == len(run.rollouts) == 32
    assert len(run.raw["env/reset_s"]) == len(run.raw["env/reward_s"]) == 32
    assert run.total("tools/guess/call_total") == len(calls) > 20
    assert run.total("tools/guess/failure_total") == 0
    assert sorted(rollout["reward"] for rollout in run.rollouts) == pytest.approx(
        sorted(line["reward"] for line in rewards)
    )
    check_conversations(run)
    check_training(run, len(rows))
    check_stages(run, "rollout", "completions", "tools", "environments", "server")
    assert Counter(line["number"] for line in resets) == {1: 8, 4: 8, 6: 8, 8: 8}
    for number in (1, 4, 6, 8):
        found = [r["reward"] for r in run.rollouts if rows[r["row_index"]]["number"] == number]
        assert len(found) == 8


def test_a_spec_that_names_a_tool_is_launched(skilled_server: RunningServer, tmp_path: Path) -> None:
    """As a run from the browser is: the calculator that comes with Offbeat, by its name in the spec."""
    from trainer_core import launch
    from trainer_core.spec import RunSpec

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    spec = RunSpec.model_validate(
        {
            "model": {"path": str(skilled_server.model_path)},
            "data": {"source": "reasoning_gym:chain_sum", "size": 12, "seed": 3, "options": options},
            "agent": {"tools": ["calculator"], "max_tool_calling_iterations": 2},
            "rollout": {"num_generations": 8, "max_completion_length": 96, "max_staleness": 0},
            "training": {
                "max_steps": 1,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "bf16": False,
            },
            "lora": {"enabled": False},
            "server": {"max_model_len": 512, "dtype": "float32"},
        }
    )
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    arguments = [
        "--spec",
        str(tmp_path / "spec.yaml"),
        "--run-dir",
        str(tmp_path),
        "--attempt-dir",
        str(tmp_path / "1"),
    ]
    arguments += ["--model", str(skilled_server.model_path), "--server", skilled_server.url]
    try:
        assert launch.main(arguments) == 0
    finally:
        restore(skilled_server)
    lines = [json.loads(line) for line in (tmp_path / "1" / "spool.jsonl").read_text().splitlines()]
    stored = [json.loads(line) for line in (tmp_path / "1" / "rollouts.jsonl").read_text().splitlines()]
    talks = [line["rollout"]["completion"] for line in stored if line["kind"] == "rollout"]
    results = [
        message for talk in talks for message in talk if message["role"] == "tool" and message["name"] == "calculator"
    ]
    right = [message["content"] for message in results if not message["content"].startswith("Error: ")]
    assert right
    assert all(float(value) == int(float(value)) for value in right), "sums of whole numbers"
    counted = sum(line["values"].get("tools/calculator/call_total", 0) for line in lines if line["kind"] == "metrics")
    assert counted >= len(results) > 0
    assert [line["name"] for line in lines if line["kind"] == "event"][-1] == "finished"
