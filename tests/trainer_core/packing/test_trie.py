"""The trie against brute force over sets of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer_core.packing.trie import PrefixTrie, TrieLayout, common_prefix, path_pairs

# Two tokens and short sequences make forks, nested prefixes and duplicates frequent.
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def nodes(sequence: list[int]) -> set[tuple[int, ...]]:
    """A node is a non-empty prefix together with the token that follows it."""
    return {tuple(sequence[: end + 1]) for end in range(1, len(sequence))}


def build(batch: list[list[int]]) -> PrefixTrie:
    trie = PrefixTrie()
    for sequence in batch:
        trie.insert(np.array(sequence))
    return trie


def laid_out(batch: list[list[int]]) -> tuple[TrieLayout, list[list[int]]]:
    """The layout, and the row positions of each sequence's nodes."""
    trie = PrefixTrie()
    leaves = [trie.insert(np.array(sequence)) for sequence in batch]
    layout = trie.layout()
    places = []
    for leaf, sequence in zip(leaves, batch, strict=True):
        stretches = trie.ranges(leaf, len(sequence) - 1)[::-1]
        assert [depth for _, depth, _ in stretches] == sorted(depth for _, depth, _ in stretches)
        places.append([place for start, _, length in stretches for place in range(start, start + length)])
    return layout, places


@given(sequences)
def test_counts_are_those_of_the_set_of_prefixes(batch: list[list[int]]) -> None:
    trie = build(batch)
    every = set().union(*(nodes(sequence) for sequence in batch))
    assert trie.tokens == len(every)
    assert trie.pairs == sum(len(node) - 1 for node in every)


@given(sequences, st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_shared_is_the_longest_known_prefix(batch: list[list[int]], sequence: list[int]) -> None:
    every = set().union(*(nodes(item) for item in batch))
    assert build(batch).locate(np.array(sequence))[1] == len(nodes(sequence) & every)


@given(sequences)
def test_layout_holds_every_sequence_and_shows_it_only_its_own_path(batch: list[list[int]]) -> None:
    layout, places = laid_out(batch)
    starts, ends, parents, subtree_ends = layout.segments.T
    size = len(layout.input_ids)
    assert sum(ends - starts) == size
    subtree_end = np.repeat(subtree_ends, ends - starts)
    index = np.arange(size)
    sees = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    for sequence, place in zip(batch, places, strict=True):
        assert layout.input_ids[place].tolist() == sequence[:-1]
        assert layout.position_ids[place].tolist() == list(range(len(sequence) - 1))
        for depth, where in enumerate(place):
            assert np.flatnonzero(sees[where]).tolist() == place[: depth + 1]
    for row, parent in enumerate(parents):
        if parent >= 0:
            assert starts[parent] < starts[row] < subtree_ends[row] <= subtree_ends[parent]
    assert not any((parents == row).sum() == 1 for row in range(len(parents)))  # else two segments are one chain


def test_each_position_predicts_one_token() -> None:
    layout, (first, second) = laid_out([[1, 2, 3, 4], [1, 2, 3, 5]])
    assert first[:2] == second[:2]
    assert first[2] != second[2]  # the token 3 is there twice: before 4 and before 5
    assert len(layout.input_ids) == 4


def test_a_chain_without_a_fork_is_one_segment() -> None:
    layout = build([[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4]]).layout()
    assert layout.segments.tolist() == [[0, 4, -1, 4]]


@given(sequences)
def test_the_heaviest_child_comes_first(batch: list[list[int]]) -> None:
    starts, ends, parents, subtree_ends = build(batch).layout().segments.T
    for row in range(len(starts)):
        weights = (subtree_ends - starts)[parents == row].tolist()
        assert weights == sorted(weights, reverse=True)
        assert not weights or starts[parents == row][0] == ends[row]


def test_samples_that_came_before_a_split_are_still_found() -> None:
    """The second ends inside the first, which is then cut above and below that end."""
    batch = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4, 5, 8]]
    layout, places = laid_out(batch)
    assert [layout.input_ids[place].tolist() for place in places] == [sequence[:-1] for sequence in batch]


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=6))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(np.array(left), np.array(right)) == expected


@given(st.integers(0, 30), st.integers(0, 30))
def test_path_pairs(start: int, length: int) -> None:
    assert path_pairs(start, start + length) == sum(depth + 1 for depth in range(start, start + length))
