"""The rollout loop: prompts in, scored samples out. Runs in the rollout worker's event loop.

Subclass `AsyncRolloutLoop` at module level and name it as `loop_cls` of a trainer subclass. `setup`, `filter_prompt`,
`generate_one` and `compute_advantages` may be overridden; `__init__` may not.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer_core.rollout import scoring
from trainer_core.rollout.answers import GenerationError
from trainer_core.rollout.chat import Chat
from trainer_core.rollout.client import Policy, ServerUnavailable, VLLMClient
from trainer_core.rollout.concurrency import ConcurrencyController
from trainer_core.rollout.environments import EnvironmentPool
from trainer_core.rollout.evaluation import EPOCH as EVALUATION_EPOCH
from trainer_core.rollout.evaluation import Evaluation
from trainer_core.rollout.link import Outbox, SampleTaken, TrainerWaits
from trainer_core.rollout.messages import (
    EvaluationRequested,
    GroupConsumed,
    GroupDropped,
    ServerBack,
    ServerLost,
    ServersAway,
    ServersReady,
    Stop,
    WeightsPushed,
)
from trainer_core.rollout.monitor import Monitor
from trainer_core.rollout.reward_pool import RewardPool
from trainer_core.rollout.sampling import EVALUATING, Sampling
from trainer_core.rollout.score_stage import ScoreStage
from trainer_core.rollout.slots import Slots
from trainer_core.rollout.staleness import StalenessAdmission
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.streams import Prompt, is_stream, stream_rows
from trainer_core.rollout.tools import Tool, ToolThreads, tool_table
from trainer_core.rollout.turns import PromptTooLong, messages_of, rollout_tools, take_turns
from trainer_core.rollout.types import Rollout, RolloutGroup
from trainer_core.spool import Spool

logger = logging.getLogger(__name__)


class RolloutFailure(RuntimeError):
    """Generation or scoring failed for good; the text is one sentence for people."""


@dataclass
class LoopSetup:
    """What the worker process hands to the loop. `rows` is the dataset; `state` says which prompts are done."""

    config: Any
    tokenizer: Any
    rows: Any
    state: RolloutState
    samples_per_step: int
    pool: RewardPool
    reward_weights: list[float]
    tools: list[Tool]
    environment_factory: Callable[[], Any] | None
    rollouts_path: Path | None
    outbox: Outbox
    wait_for_weights: bool
    eval_rows: Any = None


class AsyncRolloutLoop:
    """Generates, scores and queues groups. `self.config`, `self.tokenizer`, `self.client` and `self.policy` are public."""

    def __init__(self, given: LoopSetup) -> None:
        config = self.config = given.config
        self.tokenizer = given.tokenizer
        self.train_dataset = given.rows
        self.policy = Policy(given.state.weight_version, "")
        self.outbox = given.outbox
        self.monitor = Monitor(self)
        self.metrics = self.monitor.metrics
        self.chat = Chat(given.tokenizer, config.chat_template_kwargs)
        self.executor = ToolThreads()
        self.tools = tool_table(given.tools)
        self.environments = (
            EnvironmentPool(given.environment_factory, self.executor, self.metrics, config.tool_timeout)
            if given.environment_factory
            else None
        )
        self.admission = StalenessAdmission(
            config.max_staleness,
            given.samples_per_step * config.weight_sync_steps,
            fixed=config.fixed_batch,
            version=given.state.weight_version,
        )
        self.slots = Slots(config.max_concurrent_rollouts)
        self.controller = ConcurrencyController(config.max_concurrent_rollouts, None)
        stored = Spool(given.rollouts_path) if given.rollouts_path else None
        self.scoring = ScoreStage(self, given.pool, given.reward_weights, stored)
        self.evaluation = Evaluation(self, given.eval_rows, given.pool, given.reward_weights, stored)
        self.held_by_staleness = False
        self.groups: dict[str, asyncio.Task[None]] = {}
        self.open_groups: set[str] = set()
        self._evaluations: set[asyncio.Task[None]] = set()
        self._state = given.state
        self._changed = asyncio.Event()
        self._weights_known = not given.wait_for_weights
        self._started_at: dict[str, dict[object, int]] = {}  # by group, versions of its rollouts under way or done
        self._doomed: set[str] = set()
        self._failures = 0
        self._recent_rewards: deque[float] = deque(maxlen=given.samples_per_step)
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order = 0
        self._dispatched_in_epoch = 0

    # ---- to override ------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Called once, in the event loop, before the first prompt. Create clients here."""

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """False skips the prompt in this epoch; it counts towards the epoch as a dropped group does."""
        return True

    async def generate_one(self, row_index: int, row: dict[str, Any], epoch: int) -> Rollout:
        """One rollout: a turn of the model, the tools it calls, the next turn, until it calls none.

        Raises GenerationError when it cannot be finished; the rollout then counts as failed.
        """
        policy = self.policy  # a rollout keeps the policy it started with
        rollout = Rollout(uuid.uuid4().hex, messages_of(row["prompt"]), [], [], started_at=time.time())
        async with rollout_tools(self, row, rollout) as tools:
            await take_turns(self, policy, rollout, row["prompt"], tools)
        rollout.finished_at = time.time()
        return rollout

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """Advantages [num rollouts] from `group.rewards`, by `scale_rewards`; runs for every group, dropped ones too."""
        known = group.rewards[~np.isnan(group.rewards)]
        self._recent_rewards.extend(known)
        scale = self.config.scale_rewards
        if scale == "none" or not len(known):
            return scoring.advantages(group.rewards, None)
        # The worker knows no optimizer batch: "batch" is the last step's worth of scored rewards.
        spread = known if scale == "group" else np.array(self._recent_rewards)
        return scoring.advantages(group.rewards, float(np.std(spread)))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Generate and score until told to stop. Raises RolloutFailure when that has become pointless."""
        config = self.config
        sampling = Sampling.of_training(config)
        self.client = VLLMClient(
            config.server_urls,
            sampling,
            evaluation=sampling.of_evaluation(config),
            request_timeout=config.request_timeout,
            ready_timeout=config.vllm_server_timeout,
            on_lost=lambda url: self.outbox.send(ServerLost(url)),
            on_back=lambda url: self.outbox.send(ServerBack(url)),
            on_retry=lambda: self.metrics.add("rollout/vllm_retry_total", 1.0),
        )
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self.monitor.run())]
        try:
            await self.client.start()
            self._warn_of_biased_ratio()
            self.policy = Policy(self.policy.version, self.policy.model_name or self.client.model_name)
            self.controller = ConcurrencyController(config.max_concurrent_rollouts, self.client.full_length_capacity)
            self.slots.set_cap(self.controller.cap)
            await self.setup()
            tasks += [asyncio.create_task(self._generate()), asyncio.create_task(self.monitor.follow_servers())]
            tasks += [asyncio.create_task(self.scoring.run()) for _ in range(self.scoring.parallel)]
            done, _ = await asyncio.wait([self._end, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            own = 1 + len(tasks)
            tasks += [*self.groups.values(), *self._evaluations]
            self._end.cancel()
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(self._end, *tasks, return_exceptions=True)
            _log_others(outcomes[:own], sys.exception())  # groups and evaluations tell theirs to `fail`
            if self.environments is not None:
                await self.environments.close()
            await self.client.close()
            self.monitor.send_values()  # what was counted since the last time belongs to the run's totals

    async def _generate(self) -> None:
        """Dispatch one group after another, each when its samples will be fresh enough and there is room for it."""
        async for epoch, row_index, row in self._prompts():
            await self._until(lambda: self._weights_known)
            await self.client.until_available()
            self.held_by_staleness = not self.admission.may_dispatch()
            await self._until(self.admission.may_dispatch)
            self.held_by_staleness = False
            async with self.slots:
                pass  # a place is free; the group's rollouts take it, and wait for more of them if they must
            if not self.filter_prompt(row_index, row, epoch):
                self._drop_prompt(row_index, epoch, "filtered")
                await asyncio.sleep(0)
                continue
            self._dispatched_in_epoch += 1
            group_id = uuid.uuid4().hex
            self.admission.dispatched(group_id, self.config.num_generations)
            self.open_groups.add(group_id)
            order = self._order = self._order + 1
            task = asyncio.create_task(self._roll_out(order, group_id, row_index, row, epoch))
            self.groups[group_id] = task
            task.add_done_callback(partial(self._group_ended, group_id))
            await asyncio.sleep(0)  # let the group take its places

    async def _roll_out(self, order: int, group_id: str, row_index: int, row: dict[str, Any], epoch: int) -> None:
        """One group, from its first request into the score queue."""
        try:
            size = self.config.num_generations
            outcomes = await asyncio.gather(*(self.attempt(group_id, row_index, row, epoch) for _ in range(size)))
        except asyncio.CancelledError:
            if group_id not in self._doomed:
                raise
            self.metrics.add("sample/dropped_stale_total", float(self.config.num_generations))
            return self.drop_group(group_id, row_index, epoch, "stale")
        rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        if too_long := next((outcome for outcome in outcomes if isinstance(outcome, PromptTooLong)), None):
            self.monitor.event_once("warning", "sample_dropped", str(too_long))
            return self.drop_group(group_id, row_index, epoch, "too_long")
        if len(rollouts) < 2:
            return self.drop_group(group_id, row_index, epoch, "failed")
        begun = (turn.weight_version for rollout in rollouts for turn in rollout.turns[:1])
        version = min(begun, default=self.policy.version)
        group = RolloutGroup(group_id, row_index, epoch, row, rollouts, version)
        await self.scoring.put(order, group)

    async def _evaluate(self, step: int) -> None:
        EVALUATING.set(True)
        await self._until(lambda: self._weights_known)
        try:
            self.outbox.send(await self.evaluation.run(step))
        # nobody waits for this task: what ends it must end the run
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    async def attempt(self, group_id: str, row_index: int, row: dict[str, Any], epoch: int) -> Rollout | Exception:
        """One rollout, run again from the start when a server went away under it; the error when it failed."""
        versions = {} if epoch == EVALUATION_EPOCH else self._started_at.setdefault(group_id, {})
        this = object()
        async with self.slots:
            while True:
                versions[this] = self.policy.version
                try:
                    rollout = await self.generate_one(row_index, row, epoch)
                    if not isinstance(rollout, Rollout):
                        raise GenerationError(f"generate_one returned a {type(rollout).__name__}; a Rollout is needed")
                except ServerUnavailable:
                    del versions[this]  # it begins again, maybe under a newer version
                    await self.client.until_available()
                    continue
                except PromptTooLong as error:
                    return error
                # an overridden generate_one may raise anything; a rollout that fails is counted, up to a budget
                except Exception as error:  # noqa: BLE001
                    del versions[this]
                    self._count_failure(error)
                    return error
                self._failures = 0
                self.monitor.finished(rollout)
                return rollout

    # ---- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """One message of the trainer."""
        if isinstance(message, SampleTaken):
            self.scoring.sample_taken()
        elif isinstance(message, GroupConsumed):
            self.admission.consumed(message.group_id, trained=message.samples)
        elif isinstance(message, WeightsPushed):
            self._weights_known = True
            self.policy = Policy(message.version, message.model_name)
            self.admission.updated(message.version)
            self._cancel_doomed()
        elif isinstance(message, TrainerWaits):
            if (
                not self.open_groups
                and not self.scoring.queued_samples
                and self._weights_known
                and not (self.admission.may_dispatch())
            ):
                self.admission.trainer_starves()
        elif isinstance(message, ServersReady):
            self.client.mark_ready(message.urls)
        elif isinstance(message, ServersAway):
            self.client.leave_out(message.urls)
        elif isinstance(message, EvaluationRequested):
            task = asyncio.create_task(self._evaluate(message.step))
            self._evaluations.add(task)
            task.add_done_callback(self._evaluations.discard)
        elif isinstance(message, Stop):
            if not self._end.done():
                self._end.set_result(None)
        else:
            raise TypeError(f"the trainer sent a {type(message).__name__}, which the rollout worker does not know")
        self.wake()

    def wake(self) -> None:
        """Something changed that a waiting task may wait for."""
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _cancel_doomed(self) -> None:
        """Stop generating what would be dropped as stale anyway."""
        for group_id, task in self.groups.items():
            versions = self._started_at.get(group_id)
            if versions and self.admission.is_doomed(min(versions.values())):
                self._doomed.add(group_id)
                task.cancel()

    # ---- helpers ----------------------------------------------------------------------------------------------------

    async def _prompts(self) -> AsyncIterator[Prompt]:
        """Every prompt still to do. Raises RolloutFailure when a whole epoch is refused, StreamFailure."""
        current = None
        async for epoch, row_index, row in self._rows():
            if epoch != current:
                if current is not None and not self._dispatched_in_epoch and not self._state.done(current):
                    raise RolloutFailure(
                        f"filter_prompt refused every prompt of epoch {current}, so nothing can be trained on"
                    )
                current, self._dispatched_in_epoch = epoch, 0
            yield epoch, row_index, row

    async def _rows(self) -> AsyncIterator[Prompt]:
        seed = self.config.data_seed if self.config.data_seed is not None else self.config.seed
        shuffle = self.config.train_sampling_strategy != "sequential"
        if is_stream(self.train_dataset):
            if self._state.prompts_done():
                text = (
                    "The training dataset is a stream, which cannot be repositioned: it begins at its first row again."
                )
                self.monitor.event_once("warning", "stream_restarted", text)
            async for prompt in stream_rows(self.train_dataset, seed, shuffle, self.config.request_timeout):
                yield prompt
        for epoch, row_index in self._state.remaining(seed, shuffle):
            yield epoch, row_index, self.train_dataset[row_index]

    def drop_group(self, group_id: str, row_index: int, epoch: int, reason: Any) -> None:
        """The group gives no samples: its slot is free, its prompt counts as done."""
        self.open_groups.discard(group_id)
        self.admission.released(group_id)
        self._drop_prompt(row_index, epoch, reason)

    def _drop_prompt(self, row_index: int, epoch: int, reason: Any) -> None:
        self.metrics.add("rollout/dropped_groups_total", float(reason in ("zero_variance", "unscorable")))
        self.monitor.send_values()
        self.outbox.send(GroupDropped(row_index, epoch, reason))
        self._changed.set()

    def _group_ended(self, group_id: str, task: asyncio.Task[None]) -> None:
        del self.groups[group_id]
        self._started_at.pop(group_id, None)
        self._doomed.discard(group_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
        self._changed.set()

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        self.metrics.add("rollout/failed_total", 1.0)
        text = str(error) if isinstance(error, GenerationError) else f"{type(error).__name__}: {error}"
        self.monitor.event_once("warning", "rollout_failed", text, error)
        if self._failures >= self.config.max_generation_failures:
            self.fail(RolloutFailure(f"{self._failures} rollouts failed one after another; the last error was: {text}"))

    def fail(self, error: BaseException) -> None:
        """End the worker with this error; one that comes when another has ended it already is logged."""
        if not self._end.done():
            self._end.set_exception(error)
        else:
            _log_others([error], None)

    def _warn_of_biased_ratio(self) -> None:
        config = self.config
        if any(server.support == "unknown" for server in self.client.servers):
            self.monitor.event_once(
                "warning",
                "biased_ratio",
                "top_k, top_p or min_p restricts the sampler to a part of the vocabulary, while the trainer normalises over "
                "all of it, so the ratio to the sampler is biased. For an exact one set top_k, and start the server with "
                "--return-sampling-mask and --enable-scale-out (vLLM 0.28 or newer), or with --max-logprobs of at least top_k.",
            )
        if config.repetition_penalty != 1:
            self.monitor.event_once(
                "warning",
                "biased_ratio",
                f"repetition_penalty {config.repetition_penalty:g} changes the sampler's probabilities and not the trainer's, "
                "so the ratio to the sampler is biased; 1 makes it exact.",
            )


def _log_others(outcomes: Sequence[Any], told: BaseException | None) -> None:
    """Log failures besides the one that is `told` to the trainer, so that none goes unseen."""
    for outcome in outcomes:
        if isinstance(outcome, Exception) and outcome is not told:
            logger.error("the rollout loop was ending when this failed as well", exc_info=outcome)
