"""Gated DeltaNet layers on the tree: the rows of Qwen3-Next and Qwen3.5.

Such a layer mixes tokens in two ways. A short causal convolution reads the last few tokens; on the tree these are a token's
own ancestors. The gated delta rule (arXiv 2412.06464, equation 10) carries a state from token to token,

    S_t = exp(g_t)·(I - β_t·k_t·k_tᵀ)·S_{t-1} + β_t·k_t·v_tᵀ,   o_t = S_tᵀ·q_t

and on the tree each segment starts from the last state of its parent, roots from zero. Segments of one generation need
nothing of one another, so they run as one batch.

transformers computes both by functions of the layer's module, which get the model's keyword arguments. They are replaced by
ones that look for `tree_layout` among these, so that projections, gates and norms stay those of transformers.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN

from trainer_core.attention.layout import TreeLayout

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


def install_tree_rules(model: nn.Module) -> None:
    """Let the model's Gated DeltaNet layers, if it has any, follow a `tree_layout` where they are given one.

    Raises NotImplementedError when transformers computes such layers in a way that is not known here.
    """
    layers = {type(module) for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")}
    for source in {sys.modules[layer.__module__] for layer in layers}:
        for name, make in ((CONVOLUTION, _tree_aware_convolution), (DELTA_RULE, _tree_aware_rule)):
            function = getattr(source, name, None)
            if function is None:
                raise NotImplementedError(
                    f"Gated DeltaNet layers of transformers {transformers.__version__} have no function {name}; a version "
                    "from 5.16 to 5.19 is needed"
                )
            if not hasattr(function, "follows_tree"):
                setattr(source, name, make(function))


def _tree_aware_convolution(along_the_row: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(along_the_row)
    @torch.compiler.disable
    def convolve(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        layout: TreeLayout | None = kwargs.pop("tree_layout", None)
        if layout is None:
            return along_the_row(hidden, weight, bias, activation=activation, **kwargs)
        return tree_convolution(hidden, weight, layout, bias, activation)

    convolve.follows_tree = True  # type: ignore[attr-defined]
    return convolve


def _tree_aware_rule(along_the_row: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(along_the_row)
    @torch.compiler.disable
    def rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layout: TreeLayout | None = kwargs.pop("tree_layout", None)
        if layout is None:
            return along_the_row(query, key, value, g=g, beta=beta, **kwargs)
        normalise = kwargs.get("use_qk_l2norm_in_kernel", False)

        def run(*parts: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, decay, rate = parts
            return along_the_row(
                q, k, v, g=decay, beta=rate, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=normalise,
            )  # fmt: skip

        return tree_delta_rule(run, (query, key, value, g, beta), layout), None

    rule.follows_tree = True  # type: ignore[attr-defined]
    return rule


def tree_convolution(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    layout: TreeLayout,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution of hidden [1, C, N] with weight [C, K]: the last of the K taps meets the token itself.

    Above a root there are zeros.
    """
    taps = weight.shape[1]
    above = layout.cached("ancestors", taps, lambda: _ancestors(layout, taps - 1))
    padded = nn.functional.pad(hidden.to(weight.dtype), (0, 1))
    out = padded[..., :-1] * weight[:, -1, None]
    for distance, places in enumerate(above, start=1):
        out = out + padded[..., places] * weight[:, taps - 1 - distance, None]
    if bias is not None:
        out = out + bias[:, None]
    return (out if activation is None else ACT2FN[activation](out)).to(hidden.dtype)


def tree_delta_rule(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...], layout: TreeLayout) -> torch.Tensor:
    """Output [1, N, H, d] of the delta rule.

    `inputs` are query, key, value, decay and rate, each [1, N, ...]; `run(*parts, state=...)` computes a batch of sequences
    [B, L, ...] from their first states [B, H, dk, dv] (None: zeros) and returns outputs and last states. Padding has rate
    and decay 0, which leaves a state as it is.
    """
    padded = [torch.cat([part[0], part.new_zeros(1, *part.shape[2:])]) for part in inputs]
    outputs: list[torch.Tensor] = []
    above: torch.Tensor | None = None  # last states of the generation before
    generations: list[list[_Batch]] = layout.cached("generations", None, lambda: _generations(layout))
    for batches in generations:
        states = []
        for batch in batches:
            first = None if above is None else above[batch.parents]
            out, last = run(*(part[batch.index] for part in padded), state=first)
            outputs.append(out[batch.filled])
            states.append(last)
        above = torch.cat(states)
    order = layout.cached("delta order", None, lambda: _order(generations))
    return torch.cat(outputs)[order][None]


@dataclass(frozen=True)
class _Batch:
    """Segments of one generation and of like length. `index` [B, L] are row positions, N where padded; `filled` says where
    it is not. `parents` [B] are places among the states of the generation before."""

    index: torch.Tensor
    filled: torch.Tensor
    parents: torch.Tensor


def _generations(layout: TreeLayout) -> list[list[_Batch]]:
    """Segments by the number of segments above them, then by length up to a factor of two, which bounds padding."""
    generation = np.zeros(len(layout.segments), np.int64)
    rows: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (start, end, parent, _) in enumerate(layout.segments.tolist()):
        if parent >= 0:
            generation[row] = generation[parent] + 1
        rows[int(generation[row])][(end - start).bit_length()].append(row)
    place = np.zeros(len(layout.segments), np.int64)
    found = []
    for number in sorted(rows):
        buckets = list(rows[number].values())
        members = [row for bucket in buckets for row in bucket]
        found.append([_batch(layout, bucket, place) for bucket in buckets])
        place[members] = np.arange(len(members))
    return found


def _batch(layout: TreeLayout, rows: list[int], place: np.ndarray) -> _Batch:
    starts, ends, parents, _ = layout.segments[rows].T
    index = starts[:, None] + np.arange((ends - starts).max())
    filled = index < ends[:, None]
    arrays = (np.where(filled, index, layout.tokens), filled, place[parents])
    return _Batch(*(torch.from_numpy(array).to(layout.device) for array in arrays))


def _order(generations: list[list[_Batch]]) -> torch.Tensor:
    return torch.cat([batch.index[batch.filled] for batches in generations for batch in batches]).argsort()


def _ancestors(layout: TreeLayout, most: int) -> list[torch.Tensor]:
    """Row positions [N] of each token's ancestor 1, 2, ... `most` above it; N where there is none."""
    starts, ends, parents, _ = layout.segments.T
    parent = np.arange(layout.tokens + 1) - 1
    parent[starts] = np.where(parents < 0, layout.tokens, ends[parents] - 1)
    parent[-1] = layout.tokens
    found, places = [], np.arange(layout.tokens)
    for _ in range(most):
        places = parent[places]
        found.append(torch.from_numpy(places).to(layout.device))
    return found
