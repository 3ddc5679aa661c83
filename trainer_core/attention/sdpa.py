"""Reference backend: masked attention of torch, block by block. Runs on any device and in any precision."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer_core.attention.kernels import ScoreRule
from trainer_core.attention.layout import TreeLayout


def sdpa_tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, rule: ScoreRule
) -> torch.Tensor:
    """Attention output [1, N, query heads, d] of query [1, query heads, N, d], key and value [1, key heads, N, d].

    Each query block gathers only the keys that its tokens see, so that unrelated branches cost nothing.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # with a mask, torch's grouped-query switch falls back to the slow kernel
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    outputs = []
    for block in layout.blocks(layout.effective_window(rule.window)):
        own = slice(block.start, block.end)
        keys = key[:, :, own] if block.keys is None else key.index_select(2, block.keys)
        values = value[:, :, own] if block.keys is None else value.index_select(2, block.keys)
        outputs.append(_attend(query[:, :, own], keys, values, block.mask, rule))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    if rule.softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=rule.scale)
    # Gemma 2 (arXiv 2408.00118, section 2): scores are squashed between -softcap and softcap.
    scores = rule.softcap * torch.tanh((query @ keys.transpose(2, 3)) * (rule.scale / rule.softcap))
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf).float(), dim=-1)
    return weights.to(values.dtype) @ values
