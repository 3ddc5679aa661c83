"""Planner and collator: nothing lost, nothing over budget, groups together, rows even."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_core.training.replay import NUM_TOP, make_group
from trainer_core.packing.collator import collate
from trainer_core.packing.planner import BudgetPlanner, PackItem, RowPlan, plan_fixed
from trainer_core.rollout.types import RolloutSample


def items_of(groups: int, size: int = 4, seed: int = 0) -> list[PackItem]:
    samples = [sample for row in range(groups) for sample in make_group(row, size=size, seed=seed)]
    return [item for sample in samples if (item := PackItem.of(sample)) is not None]


def rollout_ids(plans: list[RowPlan]) -> Counter[str]:
    return Counter(item.sample.rollout_id for plan in plans for item in plan.items)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_fixed_plan_places_every_sample_once_and_leaves_no_row_without_its_share(
    groups: int, size: int, rows: int
) -> None:
    items = items_of(groups, size)
    plans = plan_fixed(items, rows, pair_cost=0.01)
    assert rollout_ids(plans) == Counter(item.sample.rollout_id for item in items)
    if len(items) >= rows and groups % rows == 0:
        assert all(plan.items for plan in plans)


def test_fixed_plan_keeps_groups_together_where_there_are_enough() -> None:
    plans = plan_fixed(items_of(8), rows=2, pair_cost=0.01)
    assert not plans[0].groups & plans[1].groups
    costs = [plan.cost for plan in plans]
    assert max(costs) / min(costs) < 1.3


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(20, 80))
def test_budget_bounds_unique_tokens_and_terms_of_every_row(groups: int, rows: int, budget: int) -> None:
    left = items_of(groups)
    placed: Counter[str] = Counter()
    while left:
        planner = BudgetPlanner(rows, budget, pair_cost=0.01)
        while left and planner.add(left[0]):
            left.pop(0)
        assert any(row.items for row in planner.rows)
        for row in planner.rows:
            assert row.trie.tokens == len(set().union(*({item.tokens[: end + 1].tobytes() for end in range(1, item.nodes + 1)} for item in row.items), set()))  # fmt: skip  # noqa: E501
            assert row.trie.tokens <= budget
            assert row.terms <= budget
        placed += rollout_ids(planner.rows)
    assert placed == Counter(item.sample.rollout_id for item in items_of(groups))


def test_a_sample_follows_its_group() -> None:
    planner = BudgetPlanner(2, token_budget=1000, pair_cost=0.01)
    for item in items_of(2):
        assert planner.add(item)
    assert [len(row.groups) for row in planner.rows] == [1, 1]


def test_the_micro_batch_closes_rather_than_growing_the_most_loaded_row() -> None:
    first, second = items_of(2, size=40), items_of(3, size=1)[2:]
    planner = BudgetPlanner(2, token_budget=100, pair_cost=0.01)
    assert planner.add(second[0])  # a light row with another group
    accepted = 0
    while planner.add(first[accepted]):
        accepted += 1
    heavy, light = sorted(planner.rows, key=lambda row: -row.cost)
    assert not light.fits(first[accepted], 100) or light.cost == heavy.cost
    assert all(row.trie.tokens <= 100 for row in planner.rows)


def test_oversize_is_seen_before_it_is_placed() -> None:
    item = items_of(1)[0]
    assert BudgetPlanner(1, item.nodes - 1, 0.01).oversize(item)
    assert not BudgetPlanner(1, item.nodes, 0.01).oversize(item)


def test_tokens_after_the_last_trained_one_are_not_forwarded() -> None:
    sample = make_group(0, size=1)[0]
    sample.completion_mask = np.zeros_like(sample.completion_mask)
    assert PackItem.of(sample) is None
    sample.completion_mask[7] = 1
    item = PackItem.of(sample)
    assert item is not None
    assert item.nodes == 7  # the token before it, and all before that


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(0, 100))
def test_every_term_keeps_what_belongs_to_its_token(groups: int, seed: int) -> None:
    items = items_of(groups, seed=seed)
    row = collate(plan_fixed(items, 1, 0.01)[0], NUM_TOP)
    found: list[tuple[Any, ...]] = []
    for term in range(row.terms):
        sample = items_by_row(items, row, int(row.sample_index[term]))
        found.append((
            sample.rollout_id, int(row.layout.position_ids[row.token_index[term]]) + 1, int(row.target_ids[term]),
            float(row.old_log_probs[term]), tuple(row.top_ids[term]), tuple(row.top_log_probs[term]),
        ))  # fmt: skip
    expected = [
        (
            item.sample.rollout_id, place, int(item.sample.input_ids[place]), float(item.sample.log_probs[place]),
            tuple(item.sample.top_ids[place]), tuple(item.sample.top_log_probs[place]),  # type: ignore[index]
        )
        for item in items for place in np.flatnonzero(item.sample.completion_mask)
    ]  # fmt: skip
    assert sorted(found) == sorted(expected)


def items_by_row(items: list[PackItem], row: Any, index: int) -> RolloutSample:
    """The sample of a row's index; advantages are distinct, so they identify it."""
    advantage = row.advantages[index]
    return next(item.sample for item in items if np.float32(item.sample.advantage) == advantage)


def test_missing_sampler_log_probabilities_are_named() -> None:
    plan = plan_fixed(items_of(1), 1, 0.01)[0]
    with pytest.raises(
        ValueError, match=f"holds {NUM_TOP} sampler log-probabilities a token; score centering needs 20"
    ):
        collate(plan, 20)


def test_a_row_of_nothing_is_one_token_without_terms() -> None:
    row = collate(RowPlan(0.01), NUM_TOP)
    assert (row.tokens, row.terms, row.samples, row.pairs) == (1, 0, 0, 0)
    assert row.top_ids.shape == (0, NUM_TOP)
