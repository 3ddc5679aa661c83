"""Evaluation: rollouts of a dataset of its own on the same servers, scored by the same reward functions.

It takes no part in training: no admission, no queue, no training order. The trainer waits while it runs, so that all of it
is the policy of one step. `generate_one` is called with epoch -1.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_core.rollout import scoring
from trainer_core.rollout.messages import EvaluationDone
from trainer_core.rollout.reward_pool import RewardPool
from trainer_core.rollout.types import Rollout, RolloutGroup
from trainer_core.spool import Spool

if TYPE_CHECKING:
    from trainer_core.rollout.loop import AsyncRolloutLoop

EPOCH = -1


class Evaluation:
    """Runs evaluations of one loop. `rows` is the evaluation dataset."""

    def __init__(
        self, loop: AsyncRolloutLoop, rows: Any, pool: RewardPool, reward_weights: list[float], stored: Spool | None
    ) -> None:
        self._loop, self._rows, self._pool, self._weights, self._spool = loop, rows, pool, reward_weights, stored

    async def run(self, step: int) -> EvaluationDone:
        """Evaluate the current policy; what cannot be generated or scored is left out and counted."""
        started = time.monotonic()
        groups = await asyncio.gather(*(self._group(step, index, row) for index, row in enumerate(self._rows)))
        rewards = [group.rewards[~np.isnan(group.rewards)] for group in groups if group is not None]
        wanted = len(self._rows) * self._loop.config.eval_num_generations
        scored = sum(len(values) for values in rewards)
        values = pass_rates(rewards, self._loop.config.eval_pass_above)
        return EvaluationDone(step, values, wanted, wanted - scored, time.monotonic() - started)

    async def _group(self, step: int, row_index: int, row: dict[str, Any]) -> RolloutGroup | None:
        loop = self._loop
        await loop.client.until_available()
        group_id = uuid.uuid4().hex
        attempts = [loop.attempt(group_id, row_index, row, EPOCH) for _ in range(loop.config.eval_num_generations)]
        rollouts = [outcome for outcome in await asyncio.gather(*attempts) if isinstance(outcome, Rollout)]
        if not rollouts:
            return None
        group = RolloutGroup(group_id, row_index, EPOCH, row, rollouts, loop.policy.version)
        scores = await self._pool.score(scoring.reward_arguments(group))
        for failed in (score for score in scores if score.failure is not None):
            text = f"Reward {failed.function} failed on an evaluation prompt: {failed.text}"
            loop.monitor.event_once(
                "warning", "reward_error", text, traceback=failed.traceback, function=failed.function
            )
        scoring.combine_rewards(group, scores, self._weights)
        if self._spool is not None:
            for record in scoring.rollout_records(group, np.zeros(len(rollouts)), None):
                marked = {**record, "row_index": stored_row(row_index), "evaluation": step}
                self._spool.rollout(group.weight_version, marked)
        return group


def stored_row(row_index: int) -> int:
    """The number under which a row of the evaluation dataset is stored: -1 for the first, so that none is one of training."""
    return -1 - row_index


def pass_rates(rewards: list[np.ndarray], above: float = 0.0) -> dict[str, float]:
    """Metrics of an evaluation from the scored rewards of each prompt; empty when nothing was scored.

    A rollout passes when its reward is above `above`. pass@1 is the share of a prompt's rollouts that pass, pass@k whether
    any does, pass@2, pass@4, ... estimates of what 2, 4, ... rollouts would give; all averaged over prompts. A prompt with
    fewer scored rollouts has no part in an estimate of more.
    """
    scored = [values for values in rewards if len(values)]
    if not scored:
        return {}
    return {
        "eval/reward": float(np.concatenate(scored).mean()),
        "eval/pass@1": float(np.mean([(values > above).mean() for values in scored])),
        **_estimates([(len(values), int((values > above).sum())) for values in scored]),
        "eval/pass@k": float(np.mean([(values > above).any() for values in scored])),
    }


def _estimates(counts: list[tuple[int, int]]) -> dict[str, float]:
    """pass@2, pass@4, ... from (rollouts, passed) of each prompt: the unbiased estimator of arXiv 2107.03374.

    1 - C(n-c, k) / C(n, k) is the chance that k of the n rollouts, drawn without replacement, hold one of the c that pass.
    """
    estimates = {}
    most = max(n for n, _ in counts)
    k = 2
    while k <= most:
        chances = [1 - math.comb(n - passed, k) / math.comb(n, k) for n, passed in counts if n >= k]
        estimates[f"eval/pass@{k}"] = float(np.mean(chances))
        k *= 2
    return estimates
