"""Admission against a simulated trainer: bounded staleness, no deadlock, in every mode."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.pacing import SETTINGS, Simulation, simulate
from trainer_core.rollout.staleness import StalenessAdmission


@pytest.mark.parametrize("steps_per_push", [1, 3])
@pytest.mark.parametrize("dropped_share", [0.0, 0.5])
def test_zero_staleness_is_synchronous_and_never_stops(steps_per_push: int, dropped_share: float) -> None:
    run = Simulation(0, 8, 64, steps_per_push, teaches_nothing=dropped_share, spread=1.0)
    run.run(30)
    assert set(run.staleness) == {0}
    assert (run.stale, run.idle_extras) == (0, 0)
    assert run.peak <= 64 * steps_per_push
    if not dropped_share:
        assert run.started == 30 * 8  # nothing is generated that is not trained on


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("step_s, rollout_s", [(1.0, 0.1), (1.0, 1.0), (0.2, 3.0)])
def test_staleness_is_held_rather_than_discarded(max_staleness: int, step_s: float, rollout_s: float) -> None:
    run = Simulation(max_staleness, 8, 32, step_s=step_s, rollout_s=rollout_s, teaches_nothing=0.3)
    run.run(100)
    assert max(run.staleness) <= max_staleness
    assert run.stale == 0
    assert run.idle_extras == 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_admission_drops_less_than_a_hundredth_where_dropping_alone_wastes_more(setting: str, seed: int) -> None:
    held, drop_only = simulate(setting, held=True, seed=seed), simulate(setting, held=False, seed=seed)
    assert held.dropped_share < 0.01
    assert held.dropped_share <= drop_only.dropped_share
    assert len(held.staleness) / held.seconds >= 0.7 * len(drop_only.staleness) / drop_only.seconds
    if setting == "trainer-bound":
        assert drop_only.dropped_share > 0.3, "without admission the queue fills with what will be too old"


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
        max_staleness, group, per_step, per_push, fixed=not varying, varying=varying, teaches_nothing=dropped, seed=seed
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
