"""What the rollout worker tells: metrics once a second, events, and the cap that follows the server's load."""

from __future__ import annotations

import asyncio
import time
import traceback as tracebacks
from typing import TYPE_CHECKING, Any

from trainer_core.rollout.answers import ServerMetrics
from trainer_core.rollout.concurrency import ServerSample
from trainer_core.rollout.link import Heartbeat
from trainer_core.rollout.messages import WorkerEvent, WorkerMetrics
from trainer_core.rollout.sampling import EVALUATING
from trainer_core.rollout.types import Rollout
from trainer_core.spool import Level

if TYPE_CHECKING:
    from trainer_core.rollout.loop import AsyncRolloutLoop

TICK_S = 0.05
FLUSH_S = 1.0
SERVER_POLL_S = 2.0
FIRST_S = 0.2
"""The first report and the second poll come early, so that a run of a second has values too."""
MAX_DISTINCT_EVENTS = 100
TOTALS = (
    "rollout/vllm_retry_total",
    "rollout/failed_total",
    "rollout/clipped_prompts_total",
    "rollout/dropped_groups_total",
)
"""Reported as 0 where nothing was counted, so that a chart tells none from unknown."""


class MetricValues:
    """Values since the last flush, by name; the trainer reduces them. Those of an evaluation are left out."""

    def __init__(self) -> None:
        self._values: dict[str, list[float | tuple[float, float]]] = {}

    def add(self, name: str, value: float | tuple[float, float]) -> None:
        if not EVALUATING.get():
            self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, list[float | tuple[float, float]]]:
        values, self._values = self._values, {}
        return values


class Monitor:
    """Belongs to one loop, whose state it reads."""

    def __init__(self, loop: AsyncRolloutLoop) -> None:
        self._loop = loop
        self.metrics = MetricValues()
        self.finished_rollouts = 0
        self._generated = 0
        self._told: set[tuple[str, str]] = set()

    def event(self, level: Level, name: str, text: str, **data: Any) -> None:
        self._loop.outbox.send(WorkerEvent(level, name, text, data))

    def event_once(self, level: Level, name: str, text: str, error: BaseException | None = None, **data: Any) -> None:
        """An event, unless the same was sent before; after MAX_DISTINCT_EVENTS one says that no more will be."""
        if (name, text) in self._told or len(self._told) > MAX_DISTINCT_EVENTS:
            return
        self._told.add((name, text))
        if len(self._told) > MAX_DISTINCT_EVENTS:
            self.event("warning", "events_left_out", f"Of events like {name}, more than {MAX_DISTINCT_EVENTS} different ones "
                       "came; those from now on are left out. The metrics still count them.")  # fmt: skip
            return
        if error is not None:
            data["traceback"] = "".join(tracebacks.format_exception(error))[-8000:]
        self.event(level, name, text, **data)

    def finished(self, rollout: Rollout) -> None:
        """A rollout is complete: its metrics count once, however often it was started."""
        tokens = sum(len(turn.output_ids) for turn in rollout.turns)
        self.finished_rollouts += 1
        self._generated += tokens
        add = self.metrics.add
        add("rollout/duration_s", rollout.finished_at - rollout.started_at)
        add("rollout/turns_mean", float(len(rollout.turns)))
        add("rollout/turns_max", float(len(rollout.turns)))
        for name in ("completions/mean_length", "completions/min_length", "completions/max_length"):
            add(name, float(tokens))
        add("completions/clipped_ratio", (float(rollout.truncated), 1.0))

    def send_values(self) -> None:
        """Send what was collected. Called before samples and drops are sent, so that no step lacks what belongs to it."""
        if values := self.metrics.take():
            self._loop.outbox.send(WorkerMetrics(values))

    async def run(self) -> None:
        """Tick: watch the event loop's lag, measure what holds generation back, send everything once a second."""
        loop = self._loop
        last = flushed = time.perf_counter()
        window = FIRST_S
        busy = queued = held = lag = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            elapsed, last = now - last, now
            lag = max(lag, elapsed - TICK_S)
            busy += loop.slots.in_flight * elapsed
            queued += loop.scoring.waiting * elapsed
            # Held back by the trainer: nothing is being generated, and the queue or the staleness bound is the reason.
            if loop.scoring.held or (loop.held_by_staleness and not loop.slots.in_flight):
                held += elapsed
            if now - flushed < window:
                continue
            span, flushed, window = now - flushed, now, FLUSH_S
            self.metrics.add("rollout/concurrency", busy / span)
            self.metrics.add("rollout/concurrency_cap", float(loop.slots.cap))
            self.metrics.add("rollout/generated_tok_s", self._generated / span)
            self.metrics.add("rollout/backpressure_s", held)
            self.metrics.add("rollout/score_queue_size", queued / span)
            self.metrics.add("rollout/event_loop_lag_s", lag)
            for name in TOTALS:
                self.metrics.add(name, 0.0)
            self.send_values()
            loop.outbox.send(Heartbeat())
            busy = queued = held = lag = 0.0
            self._generated = 0

    async def follow_servers(self) -> None:
        """Poll /metrics and let the cap of rollouts in flight follow it."""
        loop = self._loop
        before: list[ServerMetrics] = []
        pause = FIRST_S
        while True:
            asked = time.perf_counter()
            if servers := await loop.client.poll_metrics():
                self._report_servers(servers, before)
                before = servers
                loop.slots.set_cap(loop.controller.observe(self._sample(servers, time.perf_counter() - asked)))
                loop.wake()
            await asyncio.sleep(pause)
            pause = SERVER_POLL_S

    def _sample(self, servers: list[ServerMetrics], age_s: float) -> ServerSample:
        return ServerSample(
            kv_usage=max(server.kv_usage for server in servers),
            waiting=int(sum(server.waiting for server in servers)),
            preemptions=int(sum(server.preemptions for server in servers)),
            in_flight=self._loop.slots.in_flight,
            finished=self.finished_rollouts,
            age_s=age_s,
        )

    def _report_servers(self, servers: list[ServerMetrics], before: list[ServerMetrics]) -> None:
        add = self.metrics.add
        add("vllm/kv_cache_usage", max(server.kv_usage for server in servers))
        add("vllm/running", sum(server.running for server in servers))
        add("vllm/waiting", sum(server.waiting for server in servers))
        if len(before) != len(servers):
            return
        preempted = _increase(servers, before, "preemptions")
        queries, hits = _increase(servers, before, "prefix_queries"), _increase(servers, before, "prefix_hits")
        add("vllm/preemptions_total", preempted)
        if queries > 0:
            add("vllm/prefix_cache_hit_frac", hits / queries)


def _increase(now: list[ServerMetrics], before: list[ServerMetrics], name: str) -> float:
    """Growth of a total between two polls; totals begin again at 0 when a server is restarted."""
    pairs = zip(now, before, strict=True)
    return sum(max(0.0, getattr(new, name) - getattr(old, name)) for new, old in pairs)
