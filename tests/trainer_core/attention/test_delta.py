"""Gated DeltaNet on the tree, in float64, against each path on its own: outputs and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_core.attention.trees import forests
from trainer_core.attention.delta import tree_convolution, tree_delta_rule
from trainer_core.attention.layout import TreeLayout
from trainer_core.packing.trie import PrefixTrie

HEADS, WIDTH, CHANNELS, TAPS = 2, 3, 5, 4
batches = forests(tokens=3, longest=12, most=8)


def delta_rule(*parts: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as the paper writes it, token by token. Parts are [B, L, H, ...], states [B, H, k, v]."""
    q, k, v, decay, rate = parts
    held = q.new_zeros(len(q), HEADS, WIDTH, WIDTH) if state is None else state
    outputs = []
    for at in range(q.shape[1]):
        held = decay[:, at, :, None, None].exp() * held
        seen = torch.einsum("bhkv,bhk->bhv", held, k[:, at])
        change = rate[:, at, :, None] * (v[:, at] - seen)
        held = held + torch.einsum("bhk,bhv->bhkv", k[:, at], change)
        outputs.append(torch.einsum("bhkv,bhk->bhv", held, q[:, at]))
    return torch.stack(outputs, 1), held


def laid_out(batch: list[list[int]]) -> tuple[TreeLayout, list[np.ndarray]]:
    trie = PrefixTrie()
    leaves = [trie.insert(np.array(sequence)) for sequence in batch]
    layout = TreeLayout(trie.layout(), torch.device("cpu"), "none")
    paths = []
    for leaf, sequence in zip(leaves, batch, strict=True):
        ranges = trie.ranges(leaf, len(sequence) - 1)[::-1]
        paths.append(np.concatenate([np.arange(at, at + length) for at, _, length in ranges] or [np.zeros(0, int)]))
    return layout, paths


def same(on_tree: torch.Tensor, by_path: Any, paths: list[np.ndarray], inputs: list[torch.Tensor], seed: int) -> None:
    """`by_path(path)` gives [T, ...] for one path."""
    rng = np.random.default_rng(seed)
    total_tree = total_path = torch.zeros((), dtype=torch.float64)
    for path in filter(len, paths):
        alone = by_path(path)
        torch.testing.assert_close(on_tree[path], alone, atol=1e-10, rtol=0)
        weight = torch.tensor(rng.normal(size=alone.shape))
        total_tree, total_path = total_tree + (on_tree[path] * weight).sum(), total_path + (alone * weight).sum()
    mine = torch.autograd.grad(total_tree, inputs, retain_graph=True)
    theirs = torch.autograd.grad(total_path, inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@settings(max_examples=25)
@given(batches.filter(lambda batch: max(map(len, batch)) > 1), st.integers(0, 1000))
def test_the_state_branches_at_each_fork(batch: list[list[int]], seed: int) -> None:
    layout, paths = laid_out(batch)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, layout.tokens, HEADS, WIDTH, dtype=torch.float64) for _ in range(3))
    decay = -torch.rand(1, layout.tokens, HEADS, dtype=torch.float64)
    rate = torch.rand(1, layout.tokens, HEADS, dtype=torch.float64)
    inputs = [part.requires_grad_() for part in (q, k, v, decay, rate)]
    found = tree_delta_rule(delta_rule, tuple(inputs), layout)
    same(found[0], lambda path: delta_rule(*(part[:, path] for part in inputs), state=None)[0][0], paths, inputs, seed)


@pytest.mark.parametrize("activation", [None, "silu"])
@settings(max_examples=25)
@given(batches.filter(lambda batch: max(map(len, batch)) > 1), st.integers(0, 1000))
def test_the_convolution_reads_a_tokens_own_ancestors(
    activation: str | None, batch: list[list[int]], seed: int
) -> None:
    layout, paths = laid_out(batch)
    torch.manual_seed(seed)
    hidden = torch.randn(1, CHANNELS, layout.tokens, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CHANNELS, TAPS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True)

    def alone(path: np.ndarray) -> torch.Tensor:
        out = torch.nn.functional.conv1d(
            torch.nn.functional.pad(hidden[:, :, path], (TAPS - 1, 0)), weight[:, None], bias, groups=CHANNELS
        )[0].T
        return out if activation is None else torch.nn.functional.silu(out)

    found = tree_convolution(hidden, weight, layout, bias, activation)
    same(found[0].T, alone, paths, [hidden, weight, bias], seed)
