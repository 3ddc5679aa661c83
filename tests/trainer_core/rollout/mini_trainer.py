"""The trainer's half of the protocol without a model: takes samples, counts steps, keeps the training position."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer

from trainer_core.config import AsyncGRPOConfig
from trainer_core.metrics import MetricBuffer
from trainer_core.rollout.link import Outbox, QueuedSample, SampleTaken, TrainerWaits
from trainer_core.rollout.loop import AsyncRolloutLoop, LoopSetup
from trainer_core.rollout.messages import (
    EvaluationDone,
    EvaluationRequested,
    GroupConsumed,
    GroupDropped,
    ServerBack,
    ServerLost,
    ServersReady,
    WeightsPushed,
    WorkerEvent,
    WorkerMetrics,
)
from trainer_core.rollout.reward_pool import RewardPool
from trainer_core.rollout.reward_process import Zygote
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.streams import is_stream
from trainer_core.rollout.types import RolloutSample


def config_for(
    url: str, folder: Path, config_cls: type[AsyncGRPOConfig] = AsyncGRPOConfig, **options: Any
) -> AsyncGRPOConfig:
    """4 rollouts a group, 8 samples a step, against one server."""
    values: dict[str, Any] = {
        "output_dir": str(folder), "vllm_server_base_url": url, "num_generations": 4, "max_completion_length": 8,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "token_budget": 0, "max_staleness": 1,
        "max_steps": 5, "score_centering": False, "vllm_server_timeout": 10.0, "reward_timeout": 5.0, "use_cpu": True,
    }  # fmt: skip
    return config_cls(**{**values, **options})


@dataclass
class MiniTrainer:
    """Runs a loop in this process and plays the trainer. Everything it saw is in its fields."""

    config: AsyncGRPOConfig
    rows: Any
    rewards: list[Callable[..., Any]]
    tokenizer_path: Path
    state: RolloutState = field(default_factory=RolloutState)
    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop
    tools: list[Callable[..., Any]] = field(default_factory=list)
    environment_factory: Callable[[], Any] | None = None
    rollouts_path: Path | None = None
    eval_rows: Any = None
    samples: list[RolloutSample] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: list[GroupDropped] = field(default_factory=list)
    events: list[WorkerEvent] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    evaluations: list[EvaluationDone] = field(default_factory=list)
    metrics: MetricBuffer = field(default_factory=MetricBuffer)
    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    step_s: float = 0.0
    model_name: str = "policy-v{version}"

    def run(self, body: Callable[[MiniTrainer], Awaitable[None]], timeout: float = 60.0) -> None:
        """Run the loop until `body` returns. Raises what the loop raised."""
        zygote = Zygote(self.rewards)
        asyncio.run(self._run(zygote, body, timeout))

    async def _run(self, zygote: Zygote, body: Callable[[MiniTrainer], Awaitable[None]], timeout: float) -> None:
        self.state.num_rows = 0 if is_stream(self.rows) else len(self.rows)
        state = RolloutState.from_json(self.state.to_json())  # as pickling does, so that nothing is shared
        self._queue: list[tuple[int, int, RolloutSample]] = []
        self._arrivals = itertools.count()
        self._arrived = asyncio.Event()
        pool = RewardPool(zygote, self.rewards, self.config.reward_timeout)
        self.loop = self.loop_cls(
            LoopSetup(
                self.config, AutoTokenizer.from_pretrained(self.tokenizer_path), self.rows, state,
                self.config.samples_per_step, pool, [1.0] * len(self.rewards), self.tools, self.environment_factory,
                self.rollouts_path, cast(Outbox, self), wait_for_weights=self.state.prompts_done() > 0,
                eval_rows=self.eval_rows,
            )
        )  # fmt: skip
        running = asyncio.create_task(self.loop.run())
        playing = asyncio.ensure_future(body(self))
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait([running, playing], return_when=asyncio.FIRST_COMPLETED)
            for task in (playing, running):
                if task.done():
                    task.result()
        finally:
            for task in (playing, running):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(playing, running, return_exceptions=True)
            pool.close()

    def send(self, message: Any) -> None:
        """What the loop's outbox would carry to the trainer."""
        if isinstance(message, QueuedSample):
            heapq.heappush(self._queue, (message.order, next(self._arrivals), message.sample))
            self._arrived.set()
        elif isinstance(message, GroupDropped):
            self.dropped.append(message)
            self.trained[message.epoch, message.row_index] += 1
            self.state.mark(message.epoch, message.row_index)
        elif isinstance(message, EvaluationDone):
            self.evaluations.append(message)
        elif isinstance(message, WorkerEvent):
            self.events.append(message)
        elif isinstance(message, WorkerMetrics):
            for name, values in message.values.items():
                for value in values:
                    self.metrics.add(name, value)
        elif isinstance(message, ServerLost):
            self.lost.append(message.url)
        elif isinstance(message, ServerBack):
            self.push(self.state.weight_version)
            self.loop.handle(ServersReady([message.url]))

    async def take(self) -> RolloutSample:
        while not self._queue:
            self.loop.handle(TrainerWaits())
            self._arrived.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), 0.3)
        _, _, sample = heapq.heappop(self._queue)
        self.loop.handle(SampleTaken())
        return sample

    async def step(self) -> None:
        """One optimizer step: pull, drop what is stale, account for groups and prompts."""
        taken, pulled = 0, Counter[str]()
        fresh_of: Counter[str] = Counter()
        while taken < self.config.samples_per_step:
            sample = await self.take()
            age = self.state.weight_version - sample.weight_version
            fresh = age <= self.config.max_staleness
            self.staleness.append(age)
            pulled[sample.group_id] += 1
            fresh_of[sample.group_id] += fresh
            taken += fresh
            if fresh:
                self.samples.append(sample)
            if pulled[sample.group_id] == sample.group_size:
                self.loop.handle(GroupConsumed(sample.group_id, fresh_of[sample.group_id]))
                self.trained[sample.epoch, sample.row_index] += 1
                self.state.mark(sample.epoch, sample.row_index)

    def push(self, version: int) -> None:
        self.state.weight_version = version
        self.loop.handle(WeightsPushed(version, self.model_name.format(version=version)))

    async def evaluate(self, step: int) -> EvaluationDone:
        """Wait for an evaluation, as the trainer does."""
        self.loop.handle(EvaluationRequested(step))
        while not self.evaluations or self.evaluations[-1].step != step:
            await asyncio.sleep(0.01)
        return self.evaluations[-1]

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            await self.step()
            await asyncio.sleep(self.step_s)
            self.push(self.state.weight_version + 1)
