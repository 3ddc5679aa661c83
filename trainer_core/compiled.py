"""Decoder layers compiled, so that norms, rotations and activations are a few fused kernels around the matrix products."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: nn.Module) -> int:
    """Compile each decoder layer in place, for rows of any length; returns how many.

    Attention itself stays outside: its kernels are already one piece, and what they need of a row differs in each row.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)
