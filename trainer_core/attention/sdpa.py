"""Reference backend: masked scaled-dot-product attention of torch, block by block. Runs on any device."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer_core.attention.layout import TreeLayout


def sdpa_tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, scale: float, window: int | None
) -> torch.Tensor:
    """Attention output [1, N, query heads, d] of query [1, query heads, N, d], key and value [1, key heads, N, d].

    Each query block gathers only the keys that its tokens see, so that unrelated branches cost nothing.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # with a mask, torch's grouped-query switch falls back to the slow kernel
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    outputs = []
    for block in layout.blocks(window):
        own = slice(block.start, block.end)
        keys = key[:, :, own] if block.keys is None else key.index_select(2, block.keys)
        values = value[:, :, own] if block.keys is None else value.index_select(2, block.keys)
        outputs.append(scaled_dot_product_attention(query[:, :, own], keys, values, attn_mask=block.mask, scale=scale))
    return torch.cat(outputs, dim=2).transpose(1, 2)
