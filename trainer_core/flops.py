"""Model floating-point operations of a packed step, and the peak of the device.

Counted is what the model needs, once: unique tokens and the query-key pairs that attention really has. Recomputation (gradient
checkpointing, chunked logits, attention backward) is not counted, so that utilisation compares between settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    saves a third; an adapter adds its own three passes.
    """

    token_forward: float
    token_total: float
    pair_forward: float
    head_forward: float
    head_total: float

    @classmethod
    def of(cls, model: nn.Module) -> FlopCounter:
        """Counts from the linear layers of an unwrapped model (with or without PEFT)."""
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        head = base.get_output_embeddings()
        forward = total = 0
        for module in base.modules():
            if isinstance(module, nn.Linear) and module is not head:
                forward += 2 * module.weight.numel()
                total += (6 if module.weight.requires_grad else 4) * module.weight.numel()
        config = base.config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        head_size = head.weight.numel()
        return cls(
            token_forward=forward,
            token_total=total,
            pair_forward=4.0 * heads * head_dim * config.num_hidden_layers,
            head_forward=2.0 * head_size,
            head_total=(6.0 if head.weight.requires_grad else 4.0) * head_size,
        )

    @property
    def pair_cost(self) -> float:
        """Cost of an attention pair in units of a token's linear layers, for the planner."""
        return self.pair_forward / self.token_forward

    def forward(self, tokens: int, pairs: int, positions: int) -> float:
        """FLOPs of one forward pass over unique tokens, pairs and scored positions."""
        return tokens * self.token_forward + pairs * self.pair_forward + positions * self.head_forward

    def total(self, tokens: int, pairs: int, positions: int) -> float:
        """FLOPs of forward and backward. Attention's backward has twice the products of its forward."""
        return tokens * self.token_total + pairs * 3 * self.pair_forward + positions * self.head_total


def peak_flops(device: torch.device, autocast: bool) -> float | None:
    """Dense peak in FLOP/s at 16-bit precision; None where it is not known or the work is not 16-bit."""
    if device.type != "cuda" or not autocast:
        return None
    name = torch.cuda.get_device_name(device)
    matches = [part for part in PEAK_FLOPS if part in name]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
