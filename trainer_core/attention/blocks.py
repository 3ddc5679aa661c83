"""A row cut into blocks of queries with explicit masks, for kernels that know no trees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from trainer_core.transfer import to_device

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


def query_blocks(
    segments: np.ndarray, depths: np.ndarray, window: int | None, device: torch.device
) -> list[QueryBlock]:
    """Blocks of a row. With a window, a token sees only keys fewer than `window` tokens above it."""
    return [_block(segments, depths, start, end, window, device) for start, end in _cuts(segments)]


def _cuts(segments: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of queries: consecutive segments together up to QUERY_BLOCK, longer segments cut."""
    edges: list[int] = [0]
    for start, end in segments[:, :2].tolist():
        if end - edges[-1] > QUERY_BLOCK and start > edges[-1]:
            edges.append(start)
        while end - edges[-1] > QUERY_BLOCK:
            edges.append(edges[-1] + QUERY_BLOCK)
    total = int(segments[-1, 1])
    if edges[-1] < total:
        edges.append(total)
    return list(pairwise(edges))


def _block(
    segments: np.ndarray, depths: np.ndarray, start: int, end: int, window: int | None, device: torch.device
) -> QueryBlock:
    starts, ends, _, subtree_ends = segments.T
    # Segments with a descendant (or themselves) among the queries, and something at or before the last query.
    relevant = np.flatnonzero((starts < end) & (subtree_ends > start))
    keys = np.concatenate([np.arange(starts[row], min(ends[row], end)) for row in relevant])
    key_ends = np.concatenate([np.full(min(ends[row], end) - starts[row], subtree_ends[row]) for row in relevant])
    queries = np.arange(start, end)[:, None]
    mask = (keys <= queries) & (queries < key_ends)
    if window is not None:
        mask &= depths[queries] - depths[keys] < window
    seen = mask.any(axis=0)
    keys, mask = keys[seen], mask[:, seen]
    own = len(keys) == end - start and keys[0] == start
    return QueryBlock(
        start,
        end,
        None if own else to_device(keys, device),
        to_device(mask, device),
    )
