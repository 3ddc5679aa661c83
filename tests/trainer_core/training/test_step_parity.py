"""The first step says when trainer and server do not compute the same probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer_core.training.replay import make_group
from tests.trainer_core.training.test_trainer import spool_lines
from trainer_core import parity

DIFFERENCE = "sampling/step0_max_abs_diff"
MISMATCH = "sampling/mismatch_kl"


@pytest.mark.parametrize(("values", "trainer", "server", "found"), [
    ({DIFFERENCE: 0.04, MISMATCH: 0.001}, "float32", "float32", None),
    ({DIFFERENCE: 0.06, MISMATCH: 0.001}, "float32", "float32", "differs by 0.06 (expected: below 0.05)"),
    ({DIFFERENCE: 1.4, MISMATCH: 0.001}, "bfloat16", "bfloat16", None),
    ({DIFFERENCE: 1.4, MISMATCH: 0.001}, "float32", "bfloat16", None),
    ({DIFFERENCE: 1.6, MISMATCH: 0.001}, "bfloat16", "float32", "differs by 1.6 (expected: below 1.5)"),
    ({DIFFERENCE: 0.01, MISMATCH: 0.03}, "float32", "float32", "mismatch_kl is 0.03 nats (expected: below 0.02)"),
    ({}, "float32", "float32", None),
    ({DIFFERENCE: float("nan")}, "float32", "float32", None),
])  # fmt: skip
def test_limits(values: dict[str, float], trainer: str, server: str, found: str | None) -> None:
    text = parity.warning(values, trainer, server)
    if found is None:
        assert text is None
    else:
        assert text is not None
        assert found in text
        assert ("the precisions" in text) is (trainer != server)
        assert "chat template" in text
        assert "--logprobs-mode" in text


def test_a_server_of_another_model_is_said_once(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer([sample for row in range(4) for sample in make_group(row)], max_steps=2)
    trainer.train()
    warnings = [line for line in spool_lines(trainer, "event") if line["name"] == "parity"]
    assert [(line["level"], line["step"]) for line in warnings] == [("warning", 1)]
    assert "mismatch_kl is" in warnings[0]["text"]
