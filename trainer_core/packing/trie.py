"""Prefix trie of token sequences, and its layout as one row.

A node stands for one forwarded token. It is keyed on (token, next token), so that each position of a row predicts exactly
one token: sequences part one token before they differ. Chains without a fork are kept as one segment. The last token of a
sequence predicts nothing and gets no node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np


def edge_keys(tokens: np.ndarray) -> np.ndarray:
    """Keys of the nodes of a sequence, int64 [T - 1]: token in the high half, next token in the low half."""
    wide = np.asarray(tokens, dtype=np.int64)
    return (wide[:-1] << 32) | wide[1:]


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading elements are equal."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def path_pairs(start: int, end: int) -> int:
    """Query-key pairs of the tokens at depths start..end-1, each of which sees itself and all before it on its path."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass
class _Segment:
    keys: np.ndarray
    children: dict[int, _Segment] = field(default_factory=dict)


@dataclass(frozen=True)
class TrieLayout:
    """A trie in depth-first order.

    `input_ids` and `position_ids` (depth) have shape [N]. `segments` is [S, 4]: start, end, parent row (-1 for none) and
    subtree_end, so that the descendants of a segment are the tokens end..subtree_end-1. Token i sees token j exactly when
    j <= i < subtree_end of j's segment.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    segments: np.ndarray


class PrefixTrie:
    """Grows by `insert`; `tokens` and `pairs` are what one forward pass of it costs."""

    def __init__(self) -> None:
        self._roots: dict[int, _Segment] = {}
        self.tokens = 0
        self.pairs = 0

    def shared(self, keys: np.ndarray) -> int:
        """How many leading nodes of this sequence the trie already holds."""
        done, children = 0, self._roots
        while done < len(keys) and (segment := children.get(int(keys[done]))) is not None:
            equal = common_prefix(segment.keys, keys[done:])
            done += equal
            if equal < len(segment.keys):
                break
            children = segment.children
        return done

    def insert(self, keys: np.ndarray) -> None:
        """Add a sequence, given by its `edge_keys`."""
        done, children = 0, self._roots
        parent: _Segment | None = None
        while done < len(keys):
            segment = children.get(int(keys[done]))
            if segment is None:
                if parent is not None and not children:  # goes on where the longest sequence so far ended: no fork
                    parent.keys = np.concatenate([parent.keys, keys[done:]])
                else:
                    children[int(keys[done])] = _Segment(keys[done:])
                self.tokens += len(keys) - done
                self.pairs += path_pairs(done, len(keys))
                return
            equal = common_prefix(segment.keys, keys[done:])
            done += equal
            if equal < len(segment.keys):
                if done == len(keys):
                    return  # ends inside the chain: nothing forks here
                lower = _Segment(segment.keys[equal:], segment.children)
                segment.keys = segment.keys[:equal]
                segment.children = {int(lower.keys[0]): lower}
            children, parent = segment.children, segment

    def layout(self) -> tuple[TrieLayout, _Positions]:
        """The row, and a way to look up where the nodes of a sequence ended up in it."""
        starts: dict[int, int] = {}
        table: list[list[int]] = []
        chunks: list[np.ndarray] = []
        depths: list[np.ndarray] = []
        position = 0
        # Entering a segment writes it out; leaving it (rows >= 0) knows where its subtree ended. No recursion: a row may
        # be a chain of thousands of segments.
        stack: list[tuple[_Segment | None, int, int]] = [(root, -1, 0) for root in reversed(self._roots.values())]
        while stack:
            segment, parent, depth = stack.pop()
            if segment is None:
                table[parent][3] = position
                continue
            length = len(segment.keys)
            starts[id(segment)] = position
            table.append([position, position + length, parent, 0])
            chunks.append(segment.keys >> 32)
            depths.append(np.arange(depth, depth + length))
            position += length
            row = len(table) - 1
            stack.append((None, row, 0))
            stack.extend((child, row, depth + length) for child in reversed(segment.children.values()))
        empty = np.zeros(0, dtype=np.int64)
        layout = TrieLayout(
            np.concatenate(chunks) if chunks else empty,
            np.concatenate(depths) if depths else empty,
            np.array(table, dtype=np.int64).reshape(-1, 4),
        )
        return layout, _Positions(self._roots, starts)


class _Positions:
    """Where the nodes of inserted sequences are in a laid-out row."""

    def __init__(self, roots: dict[int, _Segment], starts: dict[int, int]) -> None:
        self._roots = roots
        self._starts = starts

    def of(self, keys: np.ndarray) -> np.ndarray:
        """Row positions of the nodes of an inserted sequence, int64 [len(keys)]. Raises KeyError if it was not inserted."""
        ranges = list(self._ranges(keys))
        return np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int64)

    def _ranges(self, keys: np.ndarray) -> Iterator[np.ndarray]:
        done, children = 0, self._roots
        while done < len(keys):
            segment = children[int(keys[done])]
            length = min(len(segment.keys), len(keys) - done)
            start = self._starts[id(segment)]
            yield np.arange(start, start + length)
            done += length
            children = segment.children
