"""Prefix trie of token sequences, and its layout as one row.

A node stands for one forwarded token. It is keyed on (token, next token), so that each position of a row predicts exactly
one token: sequences part one token before they differ. Chains without a fork are kept as one segment. The last token of a
sequence predicts nothing and gets no node.

Node i of a sequence lies at depth i, and all sequences through a segment agree up to its end. So a segment holds no tokens
of its own, only a range of depths of one sequence that goes through it, and comparing two sequences means comparing slices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Edge = tuple[int, int]


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading elements are equal."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def path_pairs(start: int, end: int) -> int:
    """Query-key pairs of the tokens at depths start..end-1, each of which sees itself and all before it on its path."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(eq=False, slots=True)
class Segment:
    """Nodes at depths begin..end-1 of `tokens`. A layout sets `weight`, tokens of its subtree, and `place`, its first row
    position."""

    tokens: np.ndarray
    begin: int
    end: int
    parent: Segment | None
    children: dict[Edge, Segment] = field(default_factory=dict)
    weight: int = 0
    place: int = 0


@dataclass(frozen=True)
class TrieLayout:
    """A trie in depth-first order, the heaviest child of each segment first.

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
        self._roots: dict[Edge, Segment] = {}
        self.tokens = 0
        self.pairs = 0

    def locate(self, tokens: np.ndarray) -> tuple[Segment | None, int]:
        """How many leading nodes of this sequence the trie already holds, and the segment with the last of them."""
        nodes, done = len(tokens) - 1, 0
        segment, children = None, self._roots
        while done < nodes:
            child = children.get((int(tokens[done]), int(tokens[done + 1])))
            if child is None:
                break
            segment = child
            done += 1
            done += common_prefix(child.tokens[done + 1 : child.end + 1], tokens[done + 1 :])
            if done < child.end:
                break
            children = child.children
        return segment, done

    def insert(self, tokens: np.ndarray, located: tuple[Segment | None, int] | None = None) -> Segment | None:
        """Add a sequence and return the segment of its last node, None where it has no node.

        `located` is what `locate` says of it. The array is kept, not copied. The segment stays on the sequence's path
        whatever is inserted later: splitting one gives its upper part to a new one.
        """
        nodes = len(tokens) - 1
        segment, done = self.locate(tokens) if located is None else located
        if done >= nodes:
            return segment  # ends inside a chain, or where one does: nothing forks here
        self.tokens += nodes - done
        self.pairs += path_pairs(done, nodes)
        if segment is not None and done == segment.end and not segment.children:
            segment.tokens, segment.end = tokens, nodes  # goes on where the longest sequence so far ended: no fork
            return segment
        if segment is not None and done < segment.end:
            segment = self._split(segment, done)
        leaf = Segment(tokens, done, nodes, segment)
        self._children(segment)[_edge(tokens, done)] = leaf
        return leaf

    def layout(self) -> TrieLayout:
        """The row. Afterwards `ranges` says where sequences are in it."""
        self._weigh()
        table: list[tuple[int, int, int, int]] = []
        shifts: list[int] = []  # row position minus depth, the same all over a segment
        chunks: list[np.ndarray] = []
        place = 0
        # No recursion: a row may be a chain of thousands of segments.
        stack = [(root, -1) for root in reversed(self._roots.values())]
        while stack:
            segment, parent = stack.pop()
            end = place + segment.end - segment.begin
            table.append((place, end, parent, place + segment.weight))
            shifts.append(place - segment.begin)
            chunks.append(segment.tokens[segment.begin : segment.end])
            segment.place, place = place, end
            if segment.children:
                row = len(table) - 1
                stack += [(child, row) for child in sorted(segment.children.values(), key=_weight)]
        if not table:
            empty = np.zeros(0, dtype=np.int64)
            return TrieLayout(empty, empty, np.zeros((0, 4), dtype=np.int64))
        segments = np.array(table, dtype=np.int64)
        # As few arrays of a row's length as can be: each is fresh memory, whose pages cost more than what is written to them.
        position_ids = np.repeat(shifts, segments[:, 1] - segments[:, 0])
        np.subtract(np.arange(place), position_ids, out=position_ids)
        return TrieLayout(np.concatenate(chunks, dtype=np.int64, casting="same_kind"), position_ids, segments)

    @staticmethod
    def ranges(leaf: Segment | None, nodes: int) -> list[tuple[int, int, int]]:
        """(row position, depth, length) of each stretch of a sequence, deepest first, in the trie's last layout.

        `leaf` is what `insert` returned for it and `nodes` its number of nodes.
        """
        found = []
        while leaf is not None:
            begin, end = leaf.begin, leaf.end
            if begin < nodes:  # a sequence may end above the segment that held its end when it was inserted
                found.append((leaf.place, begin, (end if end < nodes else nodes) - begin))
            leaf = leaf.parent
        return found

    def _children(self, segment: Segment | None) -> dict[Edge, Segment]:
        return self._roots if segment is None else segment.children

    def _split(self, segment: Segment, depth: int) -> Segment:
        """Cut a segment in two and return its upper part, which is new."""
        upper = Segment(segment.tokens, segment.begin, depth, segment.parent)
        self._children(segment.parent)[_edge(segment.tokens, segment.begin)] = upper
        upper.children[_edge(segment.tokens, depth)] = segment
        segment.parent, segment.begin = upper, depth
        return upper

    def _weigh(self) -> None:
        order: list[Segment] = []
        stack = list(self._roots.values())
        while stack:
            segment = stack.pop()
            order.append(segment)
            segment.weight = segment.end - segment.begin
            stack += segment.children.values()
        for segment in reversed(order):
            if segment.parent is not None:
                segment.parent.weight += segment.weight


def _edge(tokens: np.ndarray, depth: int) -> Edge:
    return int(tokens[depth]), int(tokens[depth + 1])


def _weight(segment: Segment) -> int:
    return segment.weight
