"""From a scored group to training samples and stored rollouts: pure functions over the group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer_core.rollout.conversation import reconcile, training_arrays
from trainer_core.rollout.reward_pool import Scores
from trainer_core.rollout.tools import Metrics
from trainer_core.rollout.types import Rollout, RolloutGroup, RolloutSample

EQUAL_REWARDS = 1e-9
ADVANTAGE_EPSILON = 1e-4


def reward_arguments(group: RolloutGroup) -> dict[str, Any]:
    """What reward functions are called with. Chat prompts give lists of messages, text prompts give text."""
    size = len(group.rollouts)
    columns = {name: [value] * size for name, value in group.row.items() if name != "prompt"}
    chat = not isinstance(group.row["prompt"], str)
    return {
        **columns,
        "prompts": [rollout.prompt if chat else group.row["prompt"] for rollout in group.rollouts],
        "completions": [rollout.completion if chat else _text(rollout) for rollout in group.rollouts],
        "completion_ids": [rollout.completion_ids for rollout in group.rollouts],
    }


def _text(rollout: Rollout) -> str:
    return "".join(message.get("content") or "" for message in rollout.completion)


def combine_rewards(group: RolloutGroup, scores: Sequence[Scores], weights: Sequence[float]) -> None:
    """Set `group.rewards` and `rewards_per_function`.

    A function's None is left out of a rollout's sum. A rollout is unscorable (NaN) when a function failed on it or its group,
    or when nothing scored it. A reward that a rollout or its environment brought along is added.
    """
    size = len(group.rollouts)
    total, scored, failed = np.zeros(size), np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    for score, weight in zip(scores, weights, strict=True):
        values = np.array(
            [np.nan if value is None else value for value in score.values or [None] * size], dtype=np.float64
        )
        group.rewards_per_function[score.function] = values
        known = ~np.isnan(values)
        total += np.where(known, weight * values, 0.0)
        scored |= known
        failed |= np.array(score.failed(size))
    for index, rollout in enumerate(group.rollouts):
        if rollout.reward is not None:
            total[index] += rollout.reward
            scored[index] = True
    group.rewards = np.where(scored & ~failed, total, np.nan)


def drop_reason(group: RolloutGroup) -> str | None:
    """Why the group teaches nothing: fewer than two scorable rollouts, or equal rewards."""
    scorable = group.rewards[~np.isnan(group.rewards)]
    if len(scorable) < 2:
        return "unscorable"
    return "zero_variance" if np.ptp(scorable) <= EQUAL_REWARDS else None


def advantages(rewards: np.ndarray, deviation: float | None) -> np.ndarray:
    """(reward - mean) / (deviation + 1e-4), undivided where deviation is None; 0 for unscorable rollouts."""
    if np.isnan(rewards).all():
        return np.zeros(len(rewards))
    centred = rewards - np.nanmean(rewards)
    scaled = centred if deviation is None else centred / (deviation + ADVANTAGE_EPSILON)
    return np.where(np.isnan(scaled), 0.0, scaled)


def build_samples(
    group: RolloutGroup,
    advantage: np.ndarray,
    metrics: Metrics,
    *,
    fork_threshold: int,
    drop_truncated: bool,
) -> list[RolloutSample]:
    """The group's samples: one for each sequence of each scorable rollout.

    `drop_truncated` leaves out rollouts that ended at the token limit; they have had their say in the baseline.
    """
    samples: list[RolloutSample] = []
    for index, rollout in enumerate(group.rollouts):
        reconciled = reconcile(rollout.turns, fork_threshold)
        for drift in reconciled.drifts:
            metrics.add("rollout/fork_frac", (float(drift.transition == "fork"), 1.0))
            metrics.add("rollout/realign_frac", (float(drift.transition == "realign"), 1.0))
            metrics.add("rollout/drift_tokens_mean", float(drift.tokens))
            metrics.add("rollout/drift_tokens_max", float(drift.tokens))
        metrics.add("rollout/samples_per_rollout", float(len(reconciled.sequences)))
        if np.isnan(group.rewards[index]) or (drop_truncated and rollout.truncated):
            continue
        for sequence in reconciled.sequences:
            arrays = training_arrays(sequence, rollout.turns)
            samples.append(
                RolloutSample(
                    group_id=group.group_id,
                    rollout_id=rollout.rollout_id,
                    row_index=group.row_index,
                    epoch=group.epoch,
                    weight_version=group.weight_version,
                    advantage=float(advantage[index]),
                    reward=float(group.rewards[index]),
                    truncated=rollout.truncated,
                    queued_at=time.time(),
                    group_size=0,
                    metrics=rollout.metrics,
                    **vars(arrays),
                )
            )
    for sample in samples:
        sample.group_size = len(samples)
    return samples


def rollout_records(group: RolloutGroup, advantage: np.ndarray, dropped: str | None) -> list[dict[str, Any]]:
    """The lines that are stored for the rollout viewer."""
    return [
        {
            "group_id": group.group_id,
            "rollout_id": rollout.rollout_id,
            "row_index": group.row_index,
            "epoch": group.epoch,
            "version": group.weight_version,
            "prompt": rollout.prompt,
            "completion": rollout.completion,
            "tokens": len(rollout.completion_ids),
            "turns": len(rollout.turns),
            "finish_reason": rollout.turns[-1].finish_reason if rollout.turns else "none",
            "rewards": {name: _number(values[index]) for name, values in group.rewards_per_function.items()},
            "reward": _number(group.rewards[index]),
            "advantage": float(advantage[index]),
            "dropped": dropped,
            "duration_s": round(rollout.finished_at - rollout.started_at, 3),
        }
        for index, rollout in enumerate(group.rollouts)
    ]


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
