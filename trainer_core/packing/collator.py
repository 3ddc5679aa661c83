"""From planned samples to the arrays of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer_core.packing.planner import RowPlan
from trainer_core.packing.trie import TrieLayout


@dataclass(frozen=True)
class PackedRow:
    """One row: unique tokens in depth-first order, and M loss terms that point into them.

    A term is one trained token of one sample. Several terms may share a position (identical completions) and then also
    share the target. `top_ids` and `top_log_probs` are [M, K] (K = 0 without score centering); padding has -inf.
    Per-sample arrays have the length S; `sample_index` [M] says whose term it is.
    """

    layout: TrieLayout
    token_index: np.ndarray
    target_ids: np.ndarray
    old_log_probs: np.ndarray
    sample_index: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray
    advantages: np.ndarray
    weight_versions: np.ndarray
    groups: frozenset[str]
    raw_tokens: int
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
    layout, positions = plan.trie.layout()
    if not plan.items:
        layout = TrieLayout(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([[0, 1, -1, 1]], dtype=np.int64))
    token_index, targets, old = [], [], []
    top_ids, top_log_probs = [], []
    for item in plan.items:
        sample, trained = item.sample, item.trained
        token_index.append(positions.of(item.keys)[trained - 1])
        targets.append(sample.input_ids[trained])
        old.append(sample.log_probs[trained])
        if num_top:
            if sample.top_ids is None or sample.top_log_probs is None or sample.top_ids.shape[1] < num_top:
                held = 0 if sample.top_ids is None else sample.top_ids.shape[1]
                raise ValueError(
                    f"a sample holds {held} sampler log-probabilities a token; score centering needs {num_top}"
                )
            top_ids.append(sample.top_ids[trained, :num_top])
            top_log_probs.append(sample.top_log_probs[trained, :num_top])
    terms = plan.terms
    return PackedRow(
        layout=layout,
        token_index=_join(token_index, np.int64),
        target_ids=_join(targets, np.int64),
        old_log_probs=_join(old, np.float32),
        sample_index=np.repeat(np.arange(len(plan.items)), np.array([item.terms for item in plan.items], np.int64)),
        top_ids=_join(top_ids, np.int64).reshape(terms, num_top),
        top_log_probs=_join(top_log_probs, np.float32).reshape(terms, num_top),
        advantages=np.array([item.sample.advantage for item in plan.items], dtype=np.float32),
        weight_versions=np.array([item.sample.weight_version for item in plan.items], dtype=np.int64),
        groups=frozenset(plan.groups),
        raw_tokens=sum(len(item.sample.input_ids) for item in plan.items),
        pairs=plan.trie.pairs,
        cost=plan.cost,
    )


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else np.zeros(0, dtype)
