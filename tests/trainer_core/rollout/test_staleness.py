"""Admission against a simulated trainer: bounded staleness, no deadlock, in every mode."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_core.rollout.staleness import StalenessAdmission


@dataclass
class Simulation:
    """Worker and trainer in simulated time. Samples are taken oldest group first, as the real queue gives them."""

    max_staleness: int
    group_size: int
    samples_per_step: int
    steps_per_push: int = 1
    fixed: bool = True
    step_s: float = 1.0
    rollout_s: float = 1.0
    spread: float = 0.0
    dropped_share: float = 0.0
    concurrency: int = 10_000
    varying: bool = False
    seed: int = 0
    staleness: list[int] = field(default_factory=list)
    stale: int = 0
    started: int = 0
    peak: int = 0
    idle_extras: int = 0

    def run(self, steps: int) -> None:
        rng = random.Random(self.seed)
        first_guess = self.samples_per_step * self.steps_per_push
        admission = StalenessAdmission(self.max_staleness, first_guess, fixed=self.fixed)
        flying: list[tuple[float, int, int]] = []  # (finish time, group, version)
        queue: list[tuple[int, int]] = []  # (group, version), a sample each
        now = version = 0.0
        left: dict[int, int] = {}
        for step in range(steps):
            wanted = rng.randint(1, 2 * self.samples_per_step) if self.varying else self.samples_per_step
            taken = 0
            while taken < wanted:
                while admission.may_dispatch() and len(flying) * self.group_size < self.concurrency:
                    self.started += 1
                    admission.dispatched(str(self.started), self.group_size)
                    duration = self.rollout_s * (1 + self.spread * rng.expovariate(1))
                    heapq.heappush(flying, (now + duration, self.started, int(version)))
                    self.peak = max(self.peak, admission.outstanding)
                while flying and flying[0][0] <= now:
                    self._land(heapq.heappop(flying), admission, queue, left, rng)
                if queue:
                    group, begun = heapq.heappop(queue)
                    age = int(version) - begun
                    fresh = age <= self.max_staleness
                    taken += fresh
                    self.stale += not fresh
                    if fresh:
                        self.staleness.append(age)
                    left[group] -= 1
                    if left[group] == 0:
                        admission.consumed(str(group), trained=self.group_size if fresh else 0)
                elif flying:
                    now = max(now, flying[0][0])
                elif not admission.may_dispatch():
                    self.idle_extras += 1
                    admission.trainer_starves()
            now += self.step_s
            while flying and flying[0][0] <= now:
                self._land(heapq.heappop(flying), admission, queue, left, rng)
            if (step + 1) % self.steps_per_push == 0:
                version += 1
                admission.updated(int(version))

    def _land(
        self,
        flight: tuple[float, int, int],
        admission: StalenessAdmission,
        queue: list[tuple[int, int]],
        left: dict[int, int],
        rng: random.Random,
    ) -> None:
        _, group, version = flight
        if rng.random() < self.dropped_share:
            admission.released(str(group))
            return
        admission.scored(str(group), self.group_size)
        left[group] = self.group_size
        for _ in range(self.group_size):
            heapq.heappush(queue, (group, version))


@pytest.mark.parametrize("steps_per_push", [1, 3])
@pytest.mark.parametrize("dropped_share", [0.0, 0.5])
def test_zero_staleness_is_synchronous_and_never_stops(steps_per_push: int, dropped_share: float) -> None:
    run = Simulation(0, 8, 64, steps_per_push, dropped_share=dropped_share, spread=1.0)
    run.run(30)
    assert set(run.staleness) == {0}
    assert (run.stale, run.idle_extras) == (0, 0)
    assert run.peak <= 64 * steps_per_push
    if not dropped_share:
        assert run.started == 30 * 8  # nothing is generated that is not trained on


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("step_s, rollout_s", [(1.0, 0.1), (1.0, 1.0), (0.2, 3.0)])
def test_staleness_is_held_rather_than_discarded(max_staleness: int, step_s: float, rollout_s: float) -> None:
    run = Simulation(max_staleness, 8, 32, step_s=step_s, rollout_s=rollout_s, dropped_share=0.3)
    run.run(100)
    assert max(run.staleness) <= max_staleness
    assert run.stale == 0
    assert run.idle_extras == 0


def test_a_fast_worker_uses_the_whole_allowance() -> None:
    run = Simulation(3, 8, 32, step_s=5.0, rollout_s=0.1)
    run.run(50)
    assert max(run.staleness) == 3
    assert run.peak == 4 * 32


def test_slow_rollouts_are_rarely_stale() -> None:
    """Only a group that takes longer than max_staleness + 1 steps cannot be saved: the trainer does not wait for it."""
    run = Simulation(4, 8, 32, step_s=1.0, rollout_s=0.5, spread=1.0, concurrency=256)
    run.run(300)
    assert run.stale < 0.01 * len(run.staleness)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(2, 9),
    st.integers(1, 40),
    st.integers(1, 3),
    st.booleans(),
    st.floats(0, 0.6),
    st.integers(0, 99),
)
def test_no_mode_deadlocks(
    max_staleness: int, group: int, per_step: int, per_push: int, varying: bool, dropped: float, seed: int
) -> None:
    """Groups that do not divide a step, and steps that take a varying number of samples (a token budget)."""
    run = Simulation(
        max_staleness, group, per_step, per_push, fixed=not varying, varying=varying, dropped_share=dropped, seed=seed
    )
    run.run(20)
    assert max(run.staleness) <= max_staleness


def test_a_token_budget_teaches_how_many_samples_an_update_takes() -> None:
    admission = StalenessAdmission(0, 8, fixed=False)
    for version in range(1, 6):
        for group in range(5):
            admission.dispatched(f"{version}-{group}", 8)
            admission.consumed(f"{version}-{group}", trained=8)
        admission.updated(version)
    assert admission.limit == 40


def test_doomed() -> None:
    admission = StalenessAdmission(1, 8, fixed=True)
    admission.updated(3)
    assert admission.is_doomed(1)
    assert not admission.is_doomed(2)
    with pytest.raises(ValueError, match="max_staleness -1"):
        StalenessAdmission(-1, 8, fixed=True)
