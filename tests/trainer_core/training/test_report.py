"""What a step's line in the spool is made of."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_core.training.replay import make_group
from trainer_core.report import StepReport


def test_spread_of_rewards_is_that_of_all_scored_groups_and_of_nothing_else() -> None:
    """The rollout worker sends it for each scored group; what is trained on lacks groups of equal rewards."""
    report = StepReport(torch.device("cpu"))
    for spread in (0.0, 0.0, 0.3):
        report.add("reward_std", spread)
    samples = make_group(0)
    assert len({sample.reward for sample in samples}) > 1
    report.add_samples(samples)
    assert report.step.flush()["reward_std"] == pytest.approx(0.1)
