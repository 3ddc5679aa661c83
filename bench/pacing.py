"""Staleness held by admission, against admission that only drops what came too late: one table, in simulated time.

    python bench/pacing.py

The simulator runs the product's own `StalenessAdmission`; tests/trainer_core/rollout/test_staleness.py asserts the table.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from trainer_core.rollout.staleness import StalenessAdmission

MAX_STALENESS, GROUP, SAMPLES_PER_STEP, STEPS = 4, 8, 64, 400
SETTINGS: dict[str, dict[str, float]] = {
    "trainer-bound": {"step_s": 10.0, "rollout_s": 2.0, "spread": 0.2},
    "generation-bound": {"step_s": 1.0, "rollout_s": 12.0, "spread": 0.2},
    "long-tail": {"step_s": 5.0, "rollout_s": 2.0, "spread": 1.5},
}
"""Seconds of an optimizer step, of the fastest rollout, and the mean of each rollout's tail as a share of that."""


@dataclass
class Simulation:
    """Worker and trainer in simulated time. Samples are taken oldest group first, as the real queue gives them.

    `held` admits groups by `StalenessAdmission`; without it they are dispatched whenever the concurrency and the sample queue
    have room, and what is then too old is dropped when the trainer takes it. A group takes as long as its slowest rollout:
    `rollout_s`, plus an exponential tail of mean `spread` x `rollout_s` for each rollout.
    """

    max_staleness: int
    group_size: int
    samples_per_step: int
    steps_per_push: int = 1
    fixed: bool = True
    step_s: float = 1.0
    rollout_s: float = 1.0
    spread: float = 0.0
    teaches_nothing: float = 0.0
    concurrency: int = 10_000
    varying: bool = False
    held: bool = True
    queue_maxsize: int = 1024
    seed: int = 0
    staleness: list[int] = field(default_factory=list)
    stale: int = 0
    started: int = 0
    peak: int = 0
    idle_extras: int = 0
    seconds: float = 0.0
    trainer_waited_s: float = 0.0

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
                while self._may_dispatch(admission, queue) and len(flying) * self.group_size < self.concurrency:
                    self.started += 1
                    admission.dispatched(str(self.started), self.group_size)
                    tail = max(rng.expovariate(1) for _ in range(self.group_size)) if self.spread else 0.0
                    duration = self.rollout_s * (1 + self.spread * tail)
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
                    self.trainer_waited_s += max(0.0, flying[0][0] - now)
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
        self.seconds = now

    def _may_dispatch(self, admission: StalenessAdmission, queue: list[tuple[int, int]]) -> bool:
        return admission.may_dispatch() if self.held else len(queue) < self.queue_maxsize

    @property
    def dropped_share(self) -> float:
        """Share of the samples that reached the trainer and were too old for it."""
        return self.stale / (self.stale + len(self.staleness))

    def _land(
        self,
        flight: tuple[float, int, int],
        admission: StalenessAdmission,
        queue: list[tuple[int, int]],
        left: dict[int, int],
        rng: random.Random,
    ) -> None:
        _, group, version = flight
        if rng.random() < self.teaches_nothing:
            admission.released(str(group))
            return
        admission.scored(str(group), self.group_size)
        left[group] = self.group_size
        for _ in range(self.group_size):
            heapq.heappush(queue, (group, version))


def simulate(setting: str, *, held: bool, seed: int = 0) -> Simulation:
    """One cell of the table. The concurrency is the default of AsyncGRPOConfig: max_staleness x samples of a step."""
    values = SETTINGS[setting]
    run = Simulation(
        MAX_STALENESS, GROUP, SAMPLES_PER_STEP, step_s=values["step_s"], rollout_s=values["rollout_s"],
        spread=values["spread"], concurrency=MAX_STALENESS * SAMPLES_PER_STEP, held=held, seed=seed,
    )  # fmt: skip
    run.run(STEPS)
    return run


def main() -> None:
    print(f"{STEPS} steps of {SAMPLES_PER_STEP} samples, groups of {GROUP}, max_staleness {MAX_STALENESS}")
    print(
        f"{'setting':<18}{'admission':<12}{'dropped':>9}{'staleness':>11}{'most':>6}{'trained/s':>11}{'trainer waits':>15}"
    )
    for setting in SETTINGS:
        for held in (True, False):
            run = simulate(setting, held=held)
            mean = sum(run.staleness) / len(run.staleness)
            print(
                f"{setting:<18}{'held' if held else 'drop only':<12}{run.dropped_share:>9.1%}{mean:>11.2f}"
                f"{max(run.staleness):>6}"
                f"{len(run.staleness) / run.seconds:>11.2f}{run.trainer_waited_s / run.seconds:>15.1%}"
            )


if __name__ == "__main__":
    main()
