"""The second half of the rollout loop: groups are scored, weighed against one another, stored, and queued for training."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from trainer_core.rollout import scoring
from trainer_core.rollout.link import QueuedSample
from trainer_core.rollout.reward_pool import RewardPool, Scores
from trainer_core.rollout.types import RolloutGroup
from trainer_core.rollout.watch import RewardWatch
from trainer_core.spool import Spool

if TYPE_CHECKING:
    from trainer_core.rollout.loop import AsyncRolloutLoop

SCORE_QUEUE_GROUPS = 16


class RewardFailure(RuntimeError):
    """Scoring has become pointless; the text is one sentence for people."""


class ScoreStage:
    """Bounded on both sides: by the score queue before it, and by the credit of the sample queue behind it."""

    def __init__(
        self, loop: AsyncRolloutLoop, pool: RewardPool, reward_weights: list[float], stored: Spool | None
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._weights = reward_weights
        self._spool = stored
        self._watch = RewardWatch()
        self._groups: asyncio.Queue[tuple[int, RolloutGroup, float]] = asyncio.Queue(SCORE_QUEUE_GROUPS)
        self._credit = asyncio.Semaphore(loop.config.queue_maxsize)
        self.parallel = pool.size
        self.queued_samples = 0
        self.held = 0

    @property
    def waiting(self) -> int:
        """Groups in the score queue."""
        return self._groups.qsize()

    async def put(self, order: int, group: RolloutGroup) -> None:
        """Hand over a finished group; waits while the score queue is full."""
        finished = time.perf_counter()
        await self._groups.put((order, group, finished))
        self._loop.metrics.add("rollout/score_block_s", time.perf_counter() - finished)

    def sample_taken(self) -> None:
        """The trainer took a sample out of the queue."""
        self.queued_samples -= 1
        self._credit.release()

    async def run(self) -> None:
        """Score group after group; several of these run side by side."""
        loop, metrics = self._loop, self._loop.metrics
        while True:
            order, group, finished = await self._groups.get()
            started = time.perf_counter()
            metrics.add("rollout/score_wait_s", started - finished)
            scores = await self._pool.score(scoring.reward_arguments(group))
            metrics.add("rollout/score_s", time.perf_counter() - started)
            scoring.combine_rewards(group, scores, self._weights)
            advantage = self._advantages(group)
            dropped = scoring.drop_reason(group)
            self._report(group, scores, dropped)
            samples = scoring.build_samples(
                group,
                advantage,
                metrics,
                fork_threshold=loop.config.fork_threshold_tokens,
                drop_truncated=loop.config.mask_truncated_completions,
            )
            if dropped is None and not samples:
                dropped = "failed"  # nothing of it can be trained: all truncated, or all empty
            if self._spool is not None:
                for record in scoring.rollout_records(group, advantage, dropped):
                    self._spool.rollout(group.weight_version, record)
            if dropped is not None:
                loop.drop_group(group.group_id, group.row_index, group.epoch, dropped)
                continue
            loop.admission.scored(group.group_id, len(samples))
            loop.monitor.send_values()
            for sample in samples:
                waits = self._credit.locked()
                self.held += waits
                await self._credit.acquire()
                self.held -= waits
                self.queued_samples += 1
                loop.outbox.send(QueuedSample(order, sample))
            loop.open_groups.discard(group.group_id)

    def _advantages(self, group: RolloutGroup) -> np.ndarray:
        """What the loop makes of the rewards. Raises RewardFailure where that cannot be trained on."""
        advantage = np.asarray(self._loop.compute_advantages(group), dtype=np.float64)
        if advantage.shape != group.rewards.shape:
            raise RewardFailure(
                f"compute_advantages returned an array of shape {advantage.shape} for {len(group.rollouts)} rollouts"
            )
        if not np.isfinite(advantage[~np.isnan(group.rewards)]).all():
            raise RewardFailure(
                f"compute_advantages returned {advantage}; finite numbers are needed where a reward is one"
            )
        return advantage

    def _report(self, group: RolloutGroup, scores: list[Scores], dropped: str | None) -> None:
        """Metrics and events of one group's scoring; ends the run when scoring never works."""
        metrics, monitor = self._loop.metrics, self._loop.monitor
        known = group.rewards[~np.isnan(group.rewards)]
        for score in scores:
            name = f"rewards/{score.function}"
            metrics.add(f"{name}/error_total", float(score.failure == "error"))
            metrics.add(f"{name}/timeout_total", float(score.failure == "timeout"))
            values = group.rewards_per_function[score.function]
            for value in values[~np.isnan(values)]:
                metrics.add(name, float(value))
            if score.failure is not None:
                text = f"Reward {score.function} failed on a group: {score.text}"
                monitor.event_once("warning", "reward_error", text, traceback=score.traceback, function=score.function)
        for value in known:
            metrics.add("reward", float(value))
        if len(known) >= 2:
            metrics.add("reward_std", float(np.std(known)))
            metrics.add("frac_reward_zero_std", (float(dropped == "zero_variance"), 1.0))
        failures = [score for score in scores if score.failure is not None]
        verdict = self._watch.observe(
            failed=bool(failures) and not len(known),
            equal=dropped == "zero_variance",
            unscored=not failures and not len(known),
            reward=float(known[0]) if len(known) else 0.0,
            reason=f"{failures[0].function}: {failures[0].text}" if failures else "",
        )
        if verdict is None:
            return
        if verdict.kind == "fatal":
            self._loop.fail(RewardFailure(verdict.text))
        else:
            monitor.event("warning", "reward_alarm", verdict.text)
