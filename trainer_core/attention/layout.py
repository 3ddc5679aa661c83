"""What attention needs to know about a packed row, computed once a row and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from trainer_core.packing.trie import TrieLayout

QUERY_BLOCK = 128
"""Queries of one block. Measured on a CPU: larger ones waste masked pairs, smaller ones waste calls."""


@dataclass(frozen=True)
class QueryBlock:
    """Queries start..end-1 of a row and the keys that any of them sees.

    `keys` are row positions [k] on the device, or None where they are the queries' own range. `mask` is bool [q, k], True
    where seen.
    """

    start: int
    end: int
    keys: torch.Tensor | None
    mask: torch.Tensor


class TreeLayout:
    """A row's layout on a device, with the blocks of the SDPA backend cached for each sliding window.

    `backend` names the attention backend of `trainer_core.attention.interface`.
    """

    def __init__(self, trie: TrieLayout, device: torch.device, backend: str) -> None:
        self.backend = backend
        self.device = device
        self.segments = trie.segments
        self.depths = trie.position_ids
        self._blocks: dict[int | None, list[QueryBlock]] = {}

    def blocks(self, window: int | None) -> list[QueryBlock]:
        """The row cut into query blocks. With a window, a token sees only keys fewer than `window` tokens above it."""
        if window not in self._blocks:
            self._blocks[window] = [self._block(start, end, window) for start, end in self._cuts()]
        return self._blocks[window]

    def _cuts(self) -> list[tuple[int, int]]:
        """Ranges of queries: consecutive segments together up to QUERY_BLOCK, longer segments cut."""
        edges: list[int] = [0]
        for start, end in self.segments[:, :2].tolist():
            if end - edges[-1] > QUERY_BLOCK and start > edges[-1]:
                edges.append(start)
            while end - edges[-1] > QUERY_BLOCK:
                edges.append(edges[-1] + QUERY_BLOCK)
        total = int(self.segments[-1, 1])
        if edges[-1] < total:
            edges.append(total)
        return list(pairwise(edges))

    def _block(self, start: int, end: int, window: int | None) -> QueryBlock:
        starts, ends, _, subtree_ends = self.segments.T
        # Segments with a descendant (or themselves) among the queries, and something at or before the last query.
        relevant = np.flatnonzero((starts < end) & (subtree_ends > start))
        keys = np.concatenate([np.arange(starts[row], min(ends[row], end)) for row in relevant])
        key_ends = np.concatenate([np.full(min(ends[row], end) - starts[row], subtree_ends[row]) for row in relevant])
        queries = np.arange(start, end)[:, None]
        mask = (keys <= queries) & (queries < key_ends)
        if window is not None:
            mask &= self.depths[queries] - self.depths[keys] < window
        seen = mask.any(axis=0)
        keys, mask = keys[seen], mask[:, seen]
        own = len(keys) == end - start and keys[0] == start
        return QueryBlock(
            start,
            end,
            None if own else torch.from_numpy(keys).to(self.device),
            torch.from_numpy(mask).to(self.device),
        )
