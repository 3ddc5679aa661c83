"""Tree attention as an attention implementation of transformers.

Models call the function registered under `IMPLEMENTATION`; the row's `TreeLayout` reaches it as the keyword argument
`tree_layout` of the model's forward. transformers builds no mask for an implementation that has none registered.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig

from trainer_core.attention.backends import attend
from trainer_core.attention.kernels import ScoreRule
from trainer_core.attention.layout import TreeLayout

IMPLEMENTATION = "offbeat_tree"


def uses_softcap(config: PretrainedConfig) -> bool:
    """Whether attention scores are squashed, which not every kernel can do."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def compute_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """The precision attention computes in: autocast's where it is on, else that of the weights."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weights


@torch.compiler.disable
def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_layout: TreeLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every attention layer.

    Attention dropout is not applied: the trainer's distribution has to be the server's. Raises ValueError without a
    `tree_layout`, RuntimeError when a mask was built.
    """
    if tree_layout is None:
        raise ValueError(
            f"attention implementation {IMPLEMENTATION!r} needs the argument tree_layout; to generate with this model, "
            'call set_attn_implementation("sdpa") on it first'
        )
    if attention_mask is not None:
        raise RuntimeError("a mask was built for a packed row; tree attention would ignore it")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Norms and rotations under autocast leave queries and keys in float32, which custom kernels do not cast themselves.
    dtype = compute_dtype(query.device, query.dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rule = ScoreRule(scale, sliding_window, softcap)
    return attend(tree_layout.backend)(query, key, value, tree_layout, rule), None


AttentionInterface.register(IMPLEMENTATION, tree_attention_forward)
