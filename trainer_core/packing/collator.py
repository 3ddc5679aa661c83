"""From planned samples to the arrays of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_core.packing.planner import PackItem, RowPlan
from trainer_core.packing.trie import PrefixTrie, TrieLayout

Ranges = list[tuple[int, int, int]]


@dataclass(frozen=True)
class PackedRow:
    """One row: unique tokens in depth-first order, and M loss terms that point into them.

    A term is one trained token of one sample. Several terms may share a position (identical completions) and then also
    share the target. `top_ids` and `top_log_probs` are [M, K] (K = 0 without score centering); padding has -inf.
    `support_ids` [M, W] are the tokens that the sampler chose among (-1 pads; a row of nothing but -1 means the whole
    vocabulary; W = 0 where no sample tells). Per-sample arrays have the length S; `sample_index` [M] says whose term it is.
    `multiplicity` [N] counts the samples that go through each unique token, so that its sum is `forwarded`.
    """

    layout: TrieLayout
    token_index: np.ndarray
    target_ids: np.ndarray
    old_log_probs: np.ndarray
    sample_index: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray
    support_ids: np.ndarray
    advantages: np.ndarray
    weight_versions: np.ndarray
    multiplicity: np.ndarray
    groups: frozenset[str]
    raw_tokens: int
    forwarded: int
    pairs: int
    cost: float

    @property
    def tokens(self) -> int:
        """Unique tokens, N."""
        return len(self.layout.input_ids)

    @property
    def terms(self) -> int:
        """Loss terms, M."""
        return len(self.token_index)

    @property
    def samples(self) -> int:
        """Samples, S."""
        return len(self.advantages)


def collate(plan: RowPlan, num_top: int) -> PackedRow:
    """Lay a planned row out.

    A plan without samples gives a row of one token and no term, so that a rank without work still takes part in the
    step. Raises ValueError when a sample has fewer than `num_top` sampler log-probabilities.
    """
    layout = plan.trie.layout()
    if not plan.items:
        layout = TrieLayout(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([[0, 1, -1, 1]], dtype=np.int64))
    paths = [PrefixTrie.ranges(leaf, item.nodes) for leaf, item in zip(plan.leaves, plan.items, strict=True)]
    samples = [item.sample for item in plan.items]
    trained = [item.trained for item in plan.items]
    top_ids, top_log_probs = _top(plan, num_top)
    return PackedRow(
        layout=layout,
        token_index=_positions(plan.items, paths),
        target_ids=_join([sample.input_ids[at] for sample, at in zip(samples, trained, strict=True)], np.int64),
        old_log_probs=_join([sample.log_probs[at] for sample, at in zip(samples, trained, strict=True)], np.float32),
        sample_index=np.repeat(np.arange(len(samples)), np.array([item.terms for item in plan.items], np.int64)),
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        support_ids=_support(plan.items),
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float32),
        weight_versions=np.array([sample.weight_version for sample in samples], dtype=np.int64),
        multiplicity=_multiplicity(paths, len(layout.input_ids)),
        groups=frozenset(plan.groups),
        raw_tokens=sum(len(sample.input_ids) for sample in samples),
        forwarded=sum(item.nodes for item in plan.items),
        pairs=plan.trie.pairs,
        cost=plan.cost,
    )


def _positions(items: Sequence[PackItem], paths: Sequence[Ranges]) -> np.ndarray:
    """Row positions of all terms, [M]: a node's depth plus what its segment's place and depth differ by."""
    shifts: list[int] = []
    counts: list[int] = []
    for item, path in zip(items, paths, strict=True):
        place, depth, _ = path[0]
        if item.depths[0] >= depth:  # all of its terms lie in its last stretch, as they nearly always do
            shifts.append(place - depth)
            counts.append(item.terms)
            continue
        starts = item.depths.searchsorted([depth for _, depth, _ in reversed(path)])
        counts += np.diff(starts, append=item.terms).tolist()
        shifts += [place - depth for place, depth, _ in reversed(path)]
    positions = _join([item.depths for item in items], np.int64)
    positions += np.repeat(np.array(shifts, np.int64), counts)
    return positions


def _multiplicity(paths: Sequence[Ranges], tokens: int) -> np.ndarray:
    """How many of the paths go through each row position, int32 [N]."""
    starts = [place for path in paths for place, _, _ in path]
    ends = [place + length for path in paths for place, _, length in path]
    change = np.zeros(tokens + 1, np.int32)
    np.add.at(change, np.array(starts, np.int64), 1)
    np.subtract.at(change, np.array(ends, np.int64), 1)
    return np.cumsum(change, out=change)[:-1]


def _top(plan: RowPlan, num_top: int) -> tuple[np.ndarray, np.ndarray]:
    ids, log_probs = [], []
    for item in plan.items if num_top else []:
        sample = item.sample
        if sample.top_ids is None or sample.top_log_probs is None or sample.top_ids.shape[1] < num_top:
            held = 0 if sample.top_ids is None else sample.top_ids.shape[1]
            raise ValueError(
                f"a sample holds {held} sampler log-probabilities a token; score centering needs {num_top}"
            )
        ids.append(sample.top_ids[item.trained, :num_top])
        log_probs.append(sample.top_log_probs[item.trained, :num_top])
    shape = plan.terms, num_top
    return _join(ids, np.int64).reshape(shape), _join(log_probs, np.float32).reshape(shape)


def _support(items: Sequence[PackItem]) -> np.ndarray:
    """[M, W]; W = 0 where no sample says what its sampler chose among."""
    terms = sum(item.terms for item in items)
    if all(item.sample.support is None for item in items):
        return np.zeros((terms, 0), np.int64)
    tables = [None if item.sample.support is None else item.sample.support.padded(item.depths + 1) for item in items]
    width = max(table.shape[1] for table in tables if table is not None)
    joined = np.full((terms, width), -1, dtype=np.int64)
    start = 0
    for item, table in zip(items, tables, strict=True):
        if table is not None:
            joined[start : start + item.terms, : table.shape[1]] = table
        start += item.terms
    return joined


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else np.zeros(0, dtype)
