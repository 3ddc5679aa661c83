"""FlexAttention of torch with the tree as its mask: any GPU and precision, one fused kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer_core.attention.kernels import ScoreRule
from trainer_core.attention.layout import TreeLayout


def flex_tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, rule: ScoreRule
) -> torch.Tensor:
    """Attention output [1, N, query heads, d] of query [1, query heads, N, d], key and value [1, key heads, N, d]."""
    window = layout.effective_window(rule.window)
    mask = layout.cached("flex", window, lambda: _block_mask(layout, window))
    attend = _compiled(flex_attention) if query.is_cuda else flex_attention
    grouped = query.shape[1] != key.shape[1]
    score_mod = None if rule.softcap is None else _softcap(rule.softcap, query.device)
    out = attend(query, key, value, score_mod=score_mod, block_mask=mask, scale=rule.scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _block_mask(layout: TreeLayout, window: int | None) -> BlockMask:
    ends = torch.from_numpy(layout.subtree_ends).to(layout.device)
    depths = torch.from_numpy(layout.depths).to(layout.device)

    def sees(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= query) & (query < ends[key])
        return seen if window is None else seen & (depths[query] - depths[key] < window)

    make = _compiled(create_block_mask) if layout.device.type == "cuda" else create_block_mask
    return make(sees, None, None, layout.tokens, layout.tokens, device=str(layout.device))


@cache
def _softcap(softcap: float, device: torch.device) -> Any:
    cap = torch.tensor(softcap, device=device)  # a plain number would be compiled in as a symbol, which has no gradient

    def squash(score: torch.Tensor, *_: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return squash


@cache
def _compiled(function: Any) -> Any:
    """Compiled for any number of tokens; a compilation for each length would take seconds a row."""
    return torch.compile(function, dynamic=True)
