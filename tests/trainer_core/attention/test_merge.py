"""Partial calls merged by log-sum-exp against masked attention over the whole row, in float64; gradients by autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_core.attention.reference_kernel import ReferenceKernel
from tests.trainer_core.attention.trees import forests
from trainer_core.attention import layout as layout_module
from trainer_core.attention.calls import extra_work, partial_calls
from trainer_core.attention.flex import flex_tree_attention
from trainer_core.attention.kernels import ScoreRule
from trainer_core.attention.layout import TreeLayout
from trainer_core.attention.merge import merge_
from trainer_core.attention.merged import flash_tree_attention
from trainer_core.attention.sdpa import sdpa_tree_attention
from trainer_core.packing.trie import PrefixTrie, TrieLayout

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")

# Few tokens and a shared beginning: deep trees with many forks along one chain, and rows of several trees.
batches = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=14), min_size=1, max_size=12)


def tree(batch: list[list[int]]) -> TrieLayout:
    trie = PrefixTrie()
    for sequence in batch:
        trie.insert(np.array(sequence))
    return trie.layout()


def inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, tokens, WIDTH), (1, KEY_HEADS, tokens, WIDTH), (1, KEY_HEADS, tokens, WIDTH)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def visible(layout: TrieLayout, window: int | None) -> torch.Tensor:
    """By walking up the parents of each segment, token by token."""
    size = len(layout.position_ids)
    sees = torch.zeros(size, size, dtype=torch.bool)
    segments = layout.segments.tolist()
    for row, (start, end, _, _) in enumerate(segments):
        above: list[int] = []
        up = segments[row][2]
        while up >= 0:
            above += range(segments[up][0], segments[up][1])
            up = segments[up][2]
        for token in range(start, end):
            for other in [*above, *range(start, token + 1)]:
                near = window is None or layout.position_ids[token] - layout.position_ids[other] < window
                sees[token, other] = bool(near)
    return sees


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    k, v = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return (scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def visible_at_once(layout: TrieLayout, window: int | None) -> torch.Tensor:
    """The same from subtree ends and depths, for rows too long to walk."""
    row = TreeLayout(layout, CPU, "none")
    token, ends, depths = np.arange(row.tokens), row.subtree_ends, row.depths
    sees = (token[None] <= token[:, None]) & (token[:, None] < ends[None])
    if window is not None:
        sees &= depths[:, None] - depths[None] < window
    return torch.from_numpy(sees)


def check(
    attend: Any,
    batch: list[list[int]],
    rule: ScoreRule,
    seed: int,
    tolerance: float,
    dtype: torch.dtype,
    sees: Any = visible,
) -> None:
    layout = tree(batch)
    tensors = inputs(len(layout.position_ids), seed, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = masked(*exact, sees(layout, rule.window), rule)  # type: ignore[arg-type]
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    (wanted * weight).sum().backward()
    found = attend(*tensors, TreeLayout(layout, CPU, "none"), rule)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=0)
    if not found.requires_grad:
        return
    (found * weight.to(dtype)).sum().backward()
    for mine, theirs in zip(tensors, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=tolerance, rtol=0)  # type: ignore[union-attr]


rules = st.builds(
    ScoreRule,
    st.just(WIDTH**-0.5),
    st.sampled_from([None, None, 1, 3, 20]),
    st.sampled_from([None, None, 2.0]),
)


@pytest.mark.parametrize("copy_limit", [0.0, np.inf])
@settings(deadline=None, max_examples=60)
@given(batches, rules, st.integers(0, 1000))
def test_merged_and_gathered_calls_are_tree_attention(
    copy_limit: float, batch: list[list[int]], rule: ScoreRule, seed: int
) -> None:
    kernel = ReferenceKernel()

    def attend(*arguments: Any) -> torch.Tensor:
        return flash_tree_attention(kernel, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "COPY_LIMIT", copy_limit)
        check(attend, batch, rule, seed, 1e-12, torch.float64)
    layout = tree(batch)
    assert kernel.pairs == int(visible(layout, rule.window).sum())  # no pair twice, none in vain


@pytest.mark.parametrize("copy_limit", [0.0, np.inf])
@settings(max_examples=4)
@given(forests(longest=100, most=10).filter(lambda batch: max(map(len, batch)) > 1), rules, st.integers(0, 1000))
def test_large_trees_in_float64(copy_limit: float, batch: list[list[int]], rule: ScoreRule, seed: int) -> None:
    def attend(*arguments: Any) -> torch.Tensor:
        return flash_tree_attention(ReferenceKernel(), *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "COPY_LIMIT", copy_limit)
        check(attend, batch, rule, seed, 1e-11, torch.float64, visible_at_once)


@given(batches, st.sampled_from([None, 3]))
def test_subtree_ends_and_depths_say_what_parents_say(batch: list[list[int]], window: int | None) -> None:
    layout = tree(batch)
    assert torch.equal(visible(layout, window), visible_at_once(layout, window))


@settings(deadline=None, max_examples=30)
@given(batches, rules, st.integers(0, 1000))
def test_the_sdpa_reference_is_tree_attention(batch: list[list[int]], rule: ScoreRule, seed: int) -> None:
    check(sdpa_tree_attention, batch, rule, seed, 2e-5, torch.float32)


@settings(deadline=None, max_examples=5)
@given(batches, rules, st.integers(0, 1000))
def test_flex_attention_is_tree_attention(batch: list[list[int]], rule: ScoreRule, seed: int) -> None:
    """Forward only: on a CPU torch has no backward pass of it."""

    def attend(*arguments: Any) -> torch.Tensor:
        with torch.no_grad():
            return flex_tree_attention(*(tensor.detach() for tensor in arguments[:3]), *arguments[3:])

    check(attend, batch, rule, seed, 2e-5, torch.float32)


@given(batches)
def test_extra_work_is_what_the_calls_do(batch: list[list[int]]) -> None:
    layout = TreeLayout(tree(batch), CPU, "none")
    queries, copied = extra_work(layout.segments)
    pieces = [call.cu_q.diff()[call.cu_k.diff() > 0].sum() for call in layout.partial_calls[1:]]
    assert queries == sum(int(count) for count in pieces)
    assert copied == len(layout.gathered_call(None).index) - layout.tokens
    assert not layout.gathering_pays or copied


@given(batches)
def test_no_more_calls_than_forks_nest(batch: list[list[int]]) -> None:
    """One call for the chains; a group of completions of one prompt needs one more, whatever their number."""
    layout = tree(batch)
    forks = sum(int((layout.segments[:, 2] == row).sum() > 1) for row in range(len(layout.segments)))
    assert len(partial_calls(layout.segments, CPU)) <= 1 + forks
    prompt = [1, 2, 3]
    groups = [[start, *prompt, answer] for start in range(5, 9) for answer in range(8)]
    assert len(partial_calls(tree(groups).segments, CPU)) == 2


@pytest.mark.parametrize("mark", [torch.inf, -torch.inf])
def test_a_query_without_keys_keeps_what_it_has(mark: float) -> None:
    out, lse = torch.ones(3, 2, 4), torch.zeros(2, 3)
    part, part_lse = torch.full((3, 2, 4), 5.0), torch.zeros(2, 3)
    part_lse[:, 1] = mark
    merge_(out, lse, part, part_lse)
    assert out[1].eq(1).all()
    assert lse[:, 1].eq(0).all()
    assert out[0].eq(3).all()
    torch.testing.assert_close(lse[:, 0], torch.full((2,), np.log(2.0)).float())
