"""Tree attention as calls of a kernel that knows only sequences of queries and of keys.

In depth-first order a first child begins where its parent ends, so that a segment, its first child, the first child of that
one and so on are one plain causal sequence: a **chain**. The other children of a segment M, with all below them, are one
contiguous range too, and all of it sees the same keys above: the chain of M from its start to the end of M. So

    attention of a row = causal attention within chains + unmasked attention of such ranges to their chain's prefix

and a token that k branches part from the root takes part in 1 + k of these pieces. Pieces whose queries do not overlap and
whose keys do not overlap share a call, and the log-sum-exp of each piece's scores says how to add the pieces up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from trainer_core.transfer import to_device


@dataclass(frozen=True)
class PartialCall:
    """One kernel call on slices of the row.

    Its sequence b has the queries cu_q[b]..cu_q[b+1]-1 and the keys cu_k[b]..cu_k[b+1]-1, counted within `queries` and
    `keys`; either may be empty. cu_q and cu_k are int32 [B + 1] on the device; max_q and max_k are their longest pieces.
    """

    queries: slice
    keys: slice
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    causal: bool


@dataclass(frozen=True)
class GatheredCall:
    """A causal call in which each chain's keys are its path from the root: `index` [K] are their row positions.

    The last query of a sequence sees its last key (bottom-right alignment). The copies of row position j are
    `copies[first_copy[j]:first_copy[j + 1]]`, places in `index`.
    """

    call: PartialCall
    index: torch.Tensor
    copies: torch.Tensor
    first_copy: torch.Tensor


def partial_calls(segments: np.ndarray, device: torch.device) -> list[PartialCall]:
    """The causal call over chains, and the calls of branches against the chains they leave.

    `segments` is that of a TrieLayout, where the heaviest child comes first: what parts from a chain is at most half of what
    is left of it, so a row of N tokens has branches at most log2 N deep. Pieces of one chain share keys and go into
    different calls.
    """
    chain_starts, chain_of = _chains(segments)
    edges = [*chain_starts.tolist(), int(segments[-1, 1])]
    calls = [_call(edges, edges, device, causal=True)]
    for pieces in _branches(segments, chain_starts, chain_of):
        calls.append(_branch_call(pieces, device))
    return calls


def gathered_call(segments: np.ndarray, window: int | None, device: torch.device) -> GatheredCall:
    """One call over all chains with the keys of each path, as far back as a window lets its first query see."""
    chain_starts, chain_of = _chains(segments)
    edges_q = [*chain_starts.tolist(), int(segments[-1, 1])]
    index, edges_k = [], [0]
    for chain, (start, end) in enumerate(pairwise(edges_q)):
        path = _path_above(segments, chain_starts, chain_of, chain)
        if window is not None:
            path = path[max(0, len(path) - window + 1) :]
        index += [path, np.arange(start, end)]
        edges_k.append(edges_k[-1] + len(path) + end - start)
    call = _call(edges_q, edges_k, device, causal=True)
    joined = np.concatenate(index)
    first_copy = np.concatenate([[0], np.cumsum(np.bincount(joined, minlength=edges_q[-1]))])
    arrays = (joined, np.argsort(joined, kind="stable"), first_copy)
    return GatheredCall(call, *(to_device(array, device) for array in arrays))


def extra_work(segments: np.ndarray) -> tuple[int, int]:
    """Queries that take part in further calls, counted each time, and keys that gathering would copy."""
    chain_starts, chain_of = _chains(segments)
    queries = sum(end - start for pieces in _branches(segments, chain_starts, chain_of) for start, end, _, _ in pieces)
    depth_above = np.zeros(len(chain_starts), np.int64)
    for row, (start, _, parent, _) in enumerate(segments.tolist()):
        if parent >= 0 and start != segments[parent, 1]:
            up = chain_of[parent]
            depth_above[chain_of[row]] = depth_above[up] + segments[parent, 1] - chain_starts[up]
    return queries, int(depth_above.sum())


def _chains(segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row position at which each chain starts [C], and the chain of each segment [S]."""
    starts, ends, parents, _ = segments.T
    first_child = (parents >= 0) & (starts == ends[parents])
    return starts[~first_child], np.cumsum(~first_child) - 1


def _path_above(segments: np.ndarray, chain_starts: np.ndarray, chain_of: np.ndarray, chain: int) -> np.ndarray:
    """Row positions of all ancestors of a chain, root first."""
    parts = []
    head = int(np.searchsorted(segments[:, 0], chain_starts[chain]))
    while (parent := int(segments[head, 2])) >= 0:
        above = chain_starts[chain_of[parent]]
        parts.append(np.arange(above, segments[parent, 1]))
        head = int(np.searchsorted(segments[:, 0], above))
    return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int64)


def _branches(
    segments: np.ndarray, chain_starts: np.ndarray, chain_of: np.ndarray
) -> list[list[tuple[int, int, int, int]]]:
    """(query start, query end, key start, key end) of each branching segment, in lists that are one call each."""
    depth = np.zeros(len(chain_starts), np.int64)
    first_child_end = segments[:, 1].copy()
    for row, (start, _, parent, subtree_end) in enumerate(segments.tolist()):
        if parent >= 0 and start == segments[parent, 1]:
            first_child_end[parent] = subtree_end
        elif parent >= 0:
            depth[chain_of[row]] = depth[chain_of[parent]] + 1
    calls: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    forks_of_chain = np.zeros(len(chain_starts), np.int64)
    for row in np.flatnonzero(first_child_end < segments[:, 3]):
        chain = chain_of[row]
        piece = (int(first_child_end[row]), int(segments[row, 3]), int(chain_starts[chain]), int(segments[row, 1]))
        calls[int(depth[chain]), int(forks_of_chain[chain])].append(piece)
        forks_of_chain[chain] += 1
    return [calls[key] for key in sorted(calls)]


def _branch_call(pieces: list[tuple[int, int, int, int]], device: torch.device) -> PartialCall:
    """Between two pieces come queries without keys and keys without queries, so that both stay slices of the row."""
    first_query, first_key = pieces[0][0], pieces[0][2]
    edges_q, edges_k = [0], [0]
    for query_start, query_end, key_start, key_end in pieces:
        if query_start - first_query > edges_q[-1]:
            edges_q += [query_start - first_query] * 2
            edges_k += [edges_k[-1], key_start - first_key]
        edges_q.append(query_end - first_query)
        edges_k.append(key_end - first_key)
    call = _call(edges_q, edges_k, device, causal=False)
    queries = slice(first_query, first_query + edges_q[-1])
    keys = slice(first_key, first_key + edges_k[-1])
    return PartialCall(queries, keys, call.cu_q, call.cu_k, call.max_q, call.max_k, False)


def _call(edges_q: list[int], edges_k: list[int], device: torch.device, causal: bool) -> PartialCall:
    return PartialCall(
        slice(0, edges_q[-1]),
        slice(0, edges_k[-1]),
        to_device(np.array(edges_q, np.int32), device),
        to_device(np.array(edges_k, np.int32), device),
        int(np.diff(edges_q).max()),
        int(np.diff(edges_k).max()),
        causal,
    )
