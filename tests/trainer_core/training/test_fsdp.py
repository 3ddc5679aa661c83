"""Two trainer ranks, sharded or not, make the same steps as one process; and none of them dies alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_core.training import ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
STEP_METRICS = ("loss", "kl", "entropy", "grad_norm", "rewards/trained_mean", "batch/trained_tokens_per_step", "epoch")


def job(model: Path, accumulation: int, lora: Any = None, **more: Any) -> dict[str, Any]:
    return {"model": str(model), "settings": {"gradient_accumulation_steps": accumulation}, "lora": lora, **more}


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs of one process: "full" and "lora"."""
    folder = tmp_path_factory.mktemp("alone")
    for name, lora in (("full", None), ("lora", LORA)):
        ranks.result(folder / name, ranks.run(folder / name, job(tiny_llama, 4, lora)))
    return folder


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=1e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


two_hosts = partial(ranks.launch, hosts=2)


@pytest.mark.parametrize(
    ("kind", "start"),
    [("full", ranks.run), ("lora", ranks.run), ("full", partial(ranks.run, fsdp=False)), ("full", two_hosts)],
    ids=["full", "lora", "whole copies", "two hosts"],
)
def test_two_ranks_make_the_steps_of_one(
    alone: Path, tiny_llama: Path, tmp_path: Path, kind: str, start: Callable[..., ranks.Done]
) -> None:
    """Gradients, weights, and what a push sends. In the last step rank 1 has no sample, and takes part all the same."""
    done = start(tmp_path, job(tiny_llama, 2, LORA if kind == "lora" else None), ranks=2)
    found = ranks.result(tmp_path, done)
    expected = torch.load(alone / kind / "result.pt")
    assert len(found["gradients"]) == 3
    for left, right in zip(found["gradients"], expected["gradients"], strict=True):
        close(left, right)
    close(found["state"], expected["state"])
    pushed = sorted(path.name for path in tmp_path.glob("push-*.pt"))
    assert pushed == (["push-full.pt"] if kind == "full" else ["push-adapter.pt", "push-merged.pt"])
    for name in pushed:
        close(torch.load(tmp_path / name), torch.load(alone / kind / name))

    steps = [line["values"] for line in ranks.spool_lines(tmp_path, "metrics") if "loss" in line["values"]]
    steps_alone = [line["values"] for line in ranks.spool_lines(alone / kind, "metrics") if "loss" in line["values"]]
    assert [values["batch/samples_per_step"] for values in steps] == [16, 16, 1]
    for values, values_alone in zip(steps, steps_alone, strict=True):
        for name in STEP_METRICS:
            assert values[name] == pytest.approx(values_alone[name], abs=1e-5), name
        # Rank 1 gets its own rows and nothing else: half of the samples, not a copy of all.
        assert 0 < values["perf/dispatch_mib"] < 0.02
        assert values["perf/dispatch_s"] < 0.5
    assert [event["name"] for event in events_of(tmp_path)] == ["started", "first_step"]


def events_of(folder: Path) -> list[dict[str, Any]]:
    """But for what is said about parity: the replayed samples were never sampled from this model."""
    return [event for event in ranks.spool_lines(folder, "event") if event["name"] != "parity"]


@pytest.mark.parametrize(
    ("start", "what", "sentence"),
    [
        (ranks.launch, "kill", "Trainer rank 1 ended without a word; it was killed, most often for lack of memory."),
        (two_hosts, "kill", "Trainer rank 1 on host beta ended without a word; it was killed"),
        (two_hosts, "raise", "Trainer rank 1 on host beta: ValueError: the test wants it to fail"),
        (ranks.run, "raise", "Trainer rank 1: ValueError: the test wants it to fail"),
        (ranks.run, "hang", "Trainer rank 1 has given no sign of life for"),
    ],
)
def test_a_rank_that_is_lost_ends_the_run_with_its_reason(
    tiny_llama: Path, tmp_path: Path, start: Callable[..., ranks.Done], what: str, sentence: str
) -> None:
    settings = {"gradient_accumulation_steps": 2, "heartbeat_stale_after_s": 45.0 if what == "hang" else 300.0}
    done = start(
        tmp_path, {"model": str(tiny_llama), "settings": settings, "fault": {"rank": 1, "what": what}}, ranks=2
    )
    ended = time.time()
    assert done.returncode != 0
    events = events_of(tmp_path)
    assert [event["name"] for event in events] == ["started", "first_step", "failed"]
    assert events[-1]["text"].startswith(sentence)
    assert events[-1]["t"] - events[-2]["t"] < (90 if what == "hang" else 30)
    assert ended - events[-1]["t"] < 45  # the launcher gives the others 30 s
