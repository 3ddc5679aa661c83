"""Tree attention as an attention implementation of transformers, and the choice of its backend.

Models call the function registered under `IMPLEMENTATION`; the row's `TreeLayout` reaches it as the keyword argument
`tree_layout` of the model's forward. transformers builds no mask for an implementation that has none registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig

from trainer_core.attention.layout import TreeLayout
from trainer_core.attention.sdpa import sdpa_tree_attention

IMPLEMENTATION = "offbeat_tree"
SUPPORTED_MODELS = ("llama", "mistral", "qwen2", "qwen3")
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TreeLayout, float, int | None], torch.Tensor]
BACKENDS: dict[str, Backend] = {"sdpa": sdpa_tree_attention}


def choose_backend(device: torch.device, override: str | None = None) -> str:
    """Name of the backend for a device. Raises ValueError when `override` names none."""
    if override is not None and override not in BACKENDS:
        raise ValueError(f"attention backend {override!r} does not exist; there are {', '.join(BACKENDS)}")
    del device  # every device has the same best backend so far
    return override or "sdpa"


def check_attention(config: PretrainedConfig) -> None:
    """Refuse a model that a packed row would compute wrongly.

    Raises NotImplementedError naming the model type and what is not supported.
    """
    kind = config.model_type
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if other := sorted(layers - ATTENTION_LAYERS):
        raise NotImplementedError(
            f"model type {kind!r} has layers of kind {', '.join(other)}, which mix tokens along the row without regard to "
            "the tree; only models whose every layer is attention are supported"
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            raise NotImplementedError(f"model type {kind!r} sets {name}, which tree attention does not apply")
    if kind not in SUPPORTED_MODELS:
        raise NotImplementedError(
            f"model type {kind!r} is not supported; tree packing was checked for {', '.join(SUPPORTED_MODELS)}"
        )


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
    return BACKENDS[tree_layout.backend](query, key, value, tree_layout, scale, sliding_window), None


AttentionInterface.register(IMPLEMENTATION, tree_attention_forward)
