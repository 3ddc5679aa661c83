"""Model floating-point operations of a packed step, and the peak of the device.

Counted is what the model needs, once: unique tokens and the query-key pairs that attention really has. Recomputation (gradient
checkpointing, chunked logits, attention backward) is not counted, so that utilisation compares between settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn

# Dense bfloat16 peak of a device in FLOP/s, by a part of its name (vendors' data sheets). The longest match wins.
PEAK_FLOPS = {
    "A100": 312e12,
    "A10G": 70e12,
    "A40": 149.7e12,
    "A6000": 154.8e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H20": 148e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
    "MI250X": 383e12,
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
    "MI355X": 2516.6e12,
}


@dataclass(frozen=True)
class FlopCounter:
    """FLOPs of a model per unit of work: a token through the layers, an attention pair, a scored position.

    `*_forward` is the forward pass, `*_total` forward and backward. A frozen weight needs no gradient of its own, which
    saves a third; an adapter adds its own three passes. A pair counts in all attention layers; `windows` holds for each of
    them how far back it sees, None for all the way.
    """

    token_forward: float
    token_total: float
    pair_forward: float
    head_forward: float
    head_total: float
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, model: nn.Module) -> FlopCounter:
        """Counts from the matrices of an unwrapped model's text tower (with or without PEFT), from config and shapes.

        Of the experts of a layer those count that a token goes through. A matrix of m x n costs 2mn a token (Kaplan et al.,
        arXiv 2001.08361, table 1), and so does its gradient with respect to either factor.
        """
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        head = base.get_output_embeddings()
        config = base.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        delta = 3 * 2 * _state_size(config) * kinds.count("linear_attention") if "linear_attention" in kinds else 0
        forward, total = float(delta), 3.0 * delta
        for module in base.get_decoder().modules():
            for weight in module.parameters(recurse=False):
                size = _used(module, weight, config)
                forward += 2 * size
                total += (6 if weight.requires_grad else 4) * size
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        window = getattr(config, "sliding_window", None)
        windows = tuple(window if _slides(kind, config) else None for kind in kinds if kind != "linear_attention")
        head_size = head.weight.numel()
        return cls(
            token_forward=forward,
            token_total=total,
            pair_forward=4.0 * heads * head_dim * len(windows),
            head_forward=2.0 * head_size,
            head_total=(6.0 if head.weight.requires_grad else 4.0) * head_size,
            windows=windows,
        )

    @property
    def pair_cost(self) -> float:
        """Cost of an attention pair in units of a token's linear layers, for the planner."""
        return self.pair_forward / self.token_forward

    def pairs(self, position_ids: np.ndarray) -> float:
        """Query-key pairs of a row by its tokens' depths [N], as a mean over attention layers: windows hide some."""
        seen = position_ids + 1
        by_window = {
            window: int((seen if window is None else np.minimum(seen, window)).sum()) for window in set(self.windows)
        }
        return sum(by_window[window] for window in self.windows) / max(1, len(self.windows))

    def forward(self, tokens: int, pairs: float, positions: int) -> float:
        """FLOPs of one forward pass over unique tokens, pairs and scored positions."""
        return tokens * self.token_forward + pairs * self.pair_forward + positions * self.head_forward

    def total(self, tokens: int, pairs: float, positions: int) -> float:
        """FLOPs of forward and backward. Attention's backward has twice the products of its forward."""
        return tokens * self.token_total + pairs * 3 * self.pair_forward + positions * self.head_total


def _used(module: nn.Module, weight: torch.Tensor, config: Any) -> float:
    """Entries of a weight that one token is multiplied with."""
    if isinstance(module, nn.Embedding) or weight.dim() < 2:
        return 0
    if weight.dim() == 3 and not isinstance(module, nn.Conv1d):  # experts, stacked
        return weight.numel() / weight.shape[0] * config.num_experts_per_tok
    return weight.numel()


def _state_size(config: Any) -> int:
    """Entries of a Gated DeltaNet layer's state. A token reads them twice and writes them once (arXiv 2412.06464)."""
    return config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim


def _slides(kind: str, config: Any) -> bool:
    """Whether a layer sees a window only. A config without kinds of layers (Mistral) means all of them."""
    return kind == "sliding_attention" or not getattr(config, "layer_types", None)


def peak_flops(device: torch.device, autocast: bool) -> float | None:
    """Dense peak in FLOP/s at 16-bit precision; None where it is not known or the work is not 16-bit."""
    if device.type != "cuda" or not autocast:
        return None
    name = torch.cuda.get_device_name(device)
    matches = [part for part in PEAK_FLOPS if part in name]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
