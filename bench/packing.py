"""Packing on one core: raw tokens a second through trie, planner and collator, beside TRL's TreeRow.

    python bench/packing.py

TRL's row only decides what fits and inserts it; ours also lays the row out and collates the loss terms. TRL is measured when
it can be had: 1.16.0 without its dependencies, under var/bench.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from trainer_core.packing.collator import collate
from trainer_core.packing.planner import BudgetPlanner, PackItem
from trainer_core.rollout.types import RolloutSample

ROOT = Path(__file__).parents[1]
TRL = "trl==1.16.0"
BAR = 20e6
# prompts, completions of each, tokens of a prompt, tokens of a completion
BATCHES = ((2, 8, 2000, 500), (8, 8, 200, 400), (1, 16, 8000, 2000))


def main() -> None:
    peer = tree_row()
    print("raw tokens a second on one core, CPU time, best of 40 (millions)")
    print(f"{'batch':>20} {'plan':>7} {'plan + collate':>15} {'TRL 1.16 TreeRow':>17}")
    for batch in BATCHES:
        samples = make(batch)
        raw = sum(len(sample.input_ids) for sample in samples)
        plan = raw / best(lambda samples=samples: planned(samples))
        whole = raw / best(lambda samples=samples: [collate(row, 0) for row in planned(samples).rows])
        theirs = "-" if peer is None else f"{raw / best(lambda samples=samples: peer(samples), 3) / 1e6:.2f}"
        verdict = "" if whole >= BAR else "  missed"
        print(f"{batch!s:>20} {plan / 1e6:7.1f} {whole / 1e6:15.1f} {theirs:>17}{verdict}")


def planned(samples: list[RolloutSample]) -> BudgetPlanner:
    planner = BudgetPlanner(1, 1 << 30, 0.001)
    for sample in samples:
        item = PackItem.of(sample)
        assert item is not None
        assert planner.add(item)
    return planner


def make(batch: tuple[int, int, int, int]) -> list[RolloutSample]:
    """Samples with arrays of the types that the rollout side gives them."""
    prompts, completions, prompt_tokens, tokens = batch
    rng = np.random.default_rng(0)
    found = []
    for group in range(prompts):
        prompt = rng.integers(0, 150_000, prompt_tokens)
        for index in range(completions):
            ids = np.concatenate([prompt, rng.integers(0, 150_000, tokens)]).astype(np.int32)
            found.append(
                RolloutSample(
                    group_id=str(group), rollout_id=f"{group}-{index}", row_index=group, epoch=0, weight_version=0,
                    input_ids=ids, completion_mask=(np.arange(len(ids)) >= prompt_tokens).astype(np.int8),
                    log_probs=np.zeros(len(ids), np.float32), advantage=1.0, reward=0.0, truncated=False, queued_at=0.0,
                    group_size=completions,
                )
            )  # fmt: skip
    return found


def tree_row() -> Callable[[list[RolloutSample]], Any] | None:
    """A function that packs samples with TRL's TreeRow, or None where TRL cannot be had."""
    target = ROOT / "var" / "bench" / "trl-1.16.0"
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), TRL]
        if subprocess.run(command, check=False).returncode:
            return None
    # The file alone: its package imports the whole trainer.
    source = target / "trl" / "experimental" / "async_grpo" / "packing.py"
    spec = importlib.util.spec_from_file_location("trl_packing", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        print(f"TRL's packing cannot be imported: {error}")
        return None

    def pack(samples: list[RolloutSample]) -> None:
        row = module.TreeRow()
        for sample in samples:
            fields = {
                "group_id": sample.group_id,
                "input_ids": sample.input_ids,
                "completion_mask": sample.completion_mask,
            }
            assert row.fits(fields, 1 << 30)
            row.add(fields)

    return pack


def best(work: Callable[[], Any], repeats: int = 40) -> float:
    """Least CPU seconds of several runs: the box may be shared."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


if __name__ == "__main__":
    main()
