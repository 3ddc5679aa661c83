"""Whatever happens between, each prompt is done once in each epoch."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_core.rollout.state import RolloutState, prompt_order


def test_order_is_a_permutation_of_seed_and_epoch() -> None:
    orders = [prompt_order(50, seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert (prompt_order(50, 1, 0) == orders[0]).all()
    assert list(prompt_order(5, 1, 3, shuffle=False)) == [0, 1, 2, 3, 4]


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6))
def test_kills_at_random_points_skip_and_repeat_nothing(rows: int, ahead: int, seed: int) -> None:
    """A model of training: some prompts of a window ahead become done in any order, then a kill loses the rest."""
    rng = random.Random(seed)
    state, trained = RolloutState(num_rows=rows), []
    while any(len(state.done(epoch)) < rows for epoch in range(3)):
        window = list(itertools.islice(state.remaining(7), ahead))
        for epoch, row in rng.sample(window, rng.randint(0, len(window))):
            state.mark(epoch, row)
            trained.append((epoch, row))
        state = RolloutState.from_json(state.to_json())
    assert len(trained) == len(set(trained)), "a prompt was trained on twice"
    assert set(itertools.product(range(3), range(rows))) <= set(trained)


def test_an_uninterrupted_run_visits_epoch_after_epoch() -> None:
    pairs = list(itertools.islice(RolloutState(num_rows=4).remaining(3), 12))
    assert [epoch for epoch, _ in pairs] == [0] * 4 + [1] * 4 + [2] * 4
    assert [row for _, row in pairs[4:8]] == list(prompt_order(4, 3, 1))


@given(st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 300), max_size=40), max_size=4), st.integers(0, 9))
def test_json_round_trip(done: dict[int, set[int]], version: int) -> None:
    state = RolloutState(version, num_rows=301)
    for epoch, rows in done.items():
        for row in rows:
            state.mark(epoch, row)
            state.mark(epoch, row)
    again = RolloutState.from_json(state.to_json())
    assert (again.weight_version, again.num_rows) == (version, 301)
    assert again.prompts_done() == sum(map(len, done.values()))
    assert all(again.done(epoch) == rows for epoch, rows in done.items())
    assert again.to_json() == state.to_json()


def test_first_untrained_index() -> None:
    state = RolloutState(num_rows=3)
    assert state.first_untrained_index() == 0
    for row in (0, 2):
        state.mark(0, row)
    assert state.first_untrained_index() == 1
    state.mark(0, 1)
    state.mark(1, 0)
    assert state.first_untrained_index() == 1


def test_a_large_state_is_small_and_quick() -> None:
    state = RolloutState(num_rows=100_000)
    for row in np.random.default_rng(0).permutation(100_000)[:50_000]:
        state.mark(0, int(row))
    assert len(state.to_json()) < 20_000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', json.dumps({"format": 1, "done": {"0": "!"}})])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no rollout state"):
        RolloutState.from_json(text)
