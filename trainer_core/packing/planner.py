"""Which sample goes into which row.

A micro-batch has one row for each data-parallel rank. All ranks wait for the slowest, so what counts is the cost of the
heaviest row; what saves work is keeping a group together, since its samples share their prompt.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from trainer_core.packing.trie import PrefixTrie, Segment, path_pairs
from trainer_core.rollout.types import RolloutSample


@dataclass(frozen=True, eq=False, slots=True)
class PackItem:
    """A sample, its tokens up to the last trained one, and the depths of the nodes that predict trained tokens.

    Node i predicts token i + 1; there are `nodes` of them, and `terms` predict a trained token. `trained` are the places of
    trained tokens: a slice, which copies nothing, where they are one stretch.
    """

    sample: RolloutSample
    tokens: np.ndarray
    depths: np.ndarray
    nodes: int
    terms: int
    trained: slice | np.ndarray

    @classmethod
    def of(cls, sample: RolloutSample) -> PackItem | None:
        """None when no token of the sample is trained, so that nothing needs to be forwarded."""
        depths = (sample.completion_mask[1:] != 0).nonzero()[0]  # booleans are searched several times as fast
        terms = len(depths)
        if not terms:
            return None
        first, last = int(depths[0]) + 1, int(depths[-1]) + 1
        trained: slice | np.ndarray = slice(first, last + 1) if last - first == terms - 1 else depths + 1
        return cls(sample, sample.input_ids[: last + 1], depths, last, terms, trained)


@dataclass(eq=False)
class RowPlan:
    """Samples of one row. `pair_cost` is what one attention pair costs, in units of one token's linear layers.

    `leaves` has for each sample the trie's segment of its last node.
    """

    pair_cost: float
    items: list[PackItem] = field(default_factory=list)
    leaves: list[Segment | None] = field(default_factory=list)
    trie: PrefixTrie = field(default_factory=PrefixTrie)
    groups: set[str] = field(default_factory=set)
    terms: int = 0

    @property
    def cost(self) -> float:
        return self.trie.tokens + self.pair_cost * self.trie.pairs

    def add(self, item: PackItem) -> None:
        self.leaves.append(self.trie.insert(item.tokens))
        self.items.append(item)
        self.groups.add(item.sample.group_id)
        self.terms += item.terms

    def fits(self, item: PackItem, token_budget: int) -> bool:
        """Whether unique tokens and loss terms stay within the budget with this sample."""
        if self.terms + item.terms > token_budget:
            return False
        most = self.trie.tokens + item.nodes
        return most <= token_budget or most - self.trie.locate(item.tokens)[1] <= token_budget


class BudgetPlanner:
    """Fills the rows of one micro-batch, sample by sample, up to `token_budget` unique tokens each."""

    def __init__(self, rows: int, token_budget: int, pair_cost: float) -> None:
        self.token_budget = token_budget
        self.rows = [RowPlan(pair_cost) for _ in range(rows)]

    def oversize(self, item: PackItem) -> bool:
        """Whether the sample fits into no row, not even an empty one."""
        return item.nodes > self.token_budget

    def add(self, item: PackItem) -> bool:
        """Place a sample; False when the micro-batch is closed to it.

        The row that holds its group comes first. When that is full, another row takes it if it is empty or is not the
        most loaded one; filling up the most loaded row would make every other rank wait. A group that no row holds yet
        goes to the least loaded row that has room.
        """
        group = item.sample.group_id
        roomy = [row for row in self.rows if row.fits(item, self.token_budget)]
        candidates = [row for row in roomy if group in row.groups]
        if not candidates:
            candidates = roomy
            if any(group in row.groups for row in self.rows):
                heaviest = max(row.cost for row in self.rows)
                candidates = [row for row in roomy if not row.items or row.cost < heaviest]
        if not candidates:
            return False
        min(candidates, key=lambda row: row.cost).add(item)
        return True


def plan_fixed(items: list[PackItem], rows: int, pair_cost: float) -> list[RowPlan]:
    """Spread a fixed set of samples over rows: pieces of groups, costliest first, each to the least loaded row.

    A group is cut into pieces only as far as needed to give every row its share of samples.
    """
    share = -(-len(items) // rows)
    by_group: dict[str, list[PackItem]] = defaultdict(list)
    for item in items:
        by_group[item.sample.group_id].append(item)
    pieces = [group[start : start + share] for group in by_group.values() for start in range(0, len(group), share)]
    plans = [RowPlan(pair_cost) for _ in range(rows)]
    for piece in sorted(pieces, key=lambda piece: -_piece_cost(piece, pair_cost)):
        target = min(plans, key=lambda plan: plan.cost)
        for item in piece:
            target.add(item)
    return plans


def _piece_cost(piece: list[PackItem], pair_cost: float) -> float:
    """Cost of the samples without sharing: good enough to order pieces by."""
    return sum(item.nodes + pair_cost * path_pairs(0, item.nodes) for item in piece)
