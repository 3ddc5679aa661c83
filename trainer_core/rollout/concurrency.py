"""How many rollouts may be in flight: a cap that follows the server's KV cache.

Beyond some concurrency more requests slow vLLM down: the cache fills, sequences are preempted and computed again, cached
prefixes are evicted. The cap starts at what fits for certain, grows while there is room, and is cut when there is none.
A pure state machine: `observe` takes what was seen and returns the cap.

Growth needs evidence that the cap is what limits: in-flight at 90 % of it or more, and a sample that is not older than
`STALE_AFTER_S`, since /metrics of a busy server answers late. A preemption is a cut of its own: it means that the cache
overflowed between two polls, even when its use is below `CUT_ABOVE` at both. Not where the cache has room to grow in, though: a
push of whole weights makes the server compute running requests anew, which it counts as preemptions of all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GROW_BELOW = 0.6
CUT_ABOVE = 0.8
GROWTH = 1.25
CUT = 0.7
BINDING = 0.9
STALE_AFTER_S = 15.0


@dataclass(frozen=True)
class ServerSample:
    """One look at the servers. `kv_usage` is the fullest server's share (0 to 1), `preemptions` a running total.

    `finished` counts rollouts finished since the start, `in_flight` those under way, `age_s` how old the numbers are.
    """

    kv_usage: float
    waiting: int
    preemptions: int
    in_flight: int
    finished: int
    age_s: float = 0.0


class ConcurrencyController:
    """The cap. `start` is KV cache tokens / max_model_len, or None without /metrics: then the cap stays at the ceiling."""

    def __init__(self, ceiling: int, start: float | None) -> None:
        if ceiling < 1:
            raise ValueError(f"the ceiling is {ceiling}; it must be at least 1")
        self.ceiling = ceiling
        self._cap = float(ceiling) if start is None else min(max(start, 1.0), float(ceiling))
        self._draining = False
        self._grown_at = 0
        self._preemptions: int | None = None

    @property
    def cap(self) -> int:
        return max(1, math.floor(self._cap))

    def observe(self, sample: ServerSample) -> int:
        """Follow one sample; returns the cap."""
        counted = self._preemptions is not None and sample.preemptions > self._preemptions
        preempted = counted and sample.kv_usage >= GROW_BELOW
        self._preemptions = sample.preemptions
        if sample.age_s > STALE_AFTER_S:
            return self.cap
        if self._draining and sample.in_flight <= self.cap:
            self._draining = False
        if sample.kv_usage > CUT_ABOVE or preempted:
            self._cut(sample)
        elif self._may_grow(sample):
            self._cap = min(self._cap * GROWTH, float(self.ceiling))
            self._grown_at = sample.finished
        return self.cap

    def _cut(self, sample: ServerSample) -> None:
        """Cut once, from what is really in flight; the next cut waits until the pool is under the new cap."""
        if self._draining:
            return
        self._cap = max(1.0, min(self._cap, float(max(sample.in_flight, 1))) * CUT)
        self._draining = sample.in_flight > self.cap
        self._grown_at = sample.finished

    def _may_grow(self, sample: ServerSample) -> bool:
        turned_over = sample.finished - self._grown_at >= self.cap
        binding = sample.in_flight >= BINDING * self.cap
        return not self._draining and sample.kv_usage < GROW_BELOW and sample.waiting == 0 and turned_over and binding
