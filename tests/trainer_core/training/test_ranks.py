"""Two data-parallel ranks make the same update as one, also in a last step that has work for only one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.trainer_core.training.ranks_program"


def step_values(output: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (output / "spool.jsonl").read_text().splitlines())
    return [line["values"] for line in lines if line["kind"] == "metrics"]


@pytest.mark.slow
def test_two_ranks_are_one(tiny_llama: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    launchers = {
        one: ([sys.executable, "-m", PROGRAM], 4),
        two: (
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", PROGRAM],
            2,
        ),
    }
    for output, (launcher, accumulation) in launchers.items():
        subprocess.run([*launcher, str(tiny_llama), str(output), str(accumulation)], cwd=ROOT, check=True, timeout=240)
    expected, found = torch.load(one / "weights-1.pt"), torch.load(two / "weights-2.pt")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)
    lines = {output: step_values(output) for output in (one, two)}
    assert [values["batch/samples_per_step"] for values in lines[two]] == [16, 16, 4]
    for left, right in zip(lines[one], lines[two], strict=True):
        for name in (
            "loss",
            "kl",
            "entropy",
            "grad_norm",
            "rewards/trained_mean",
            "batch/trained_tokens_per_step",
            "epoch",
        ):
            assert right[name] == pytest.approx(left[name], abs=1e-5), name
