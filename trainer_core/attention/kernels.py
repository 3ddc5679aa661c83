"""Variable-length attention kernels that return the log-sum-exp and take it back in the backward pass.

What tree attention asks of a kernel is less than an autograd function: the forward pass of one call, and the backward pass of
one call *given an output and a log-sum-exp of more than this call's keys*.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer_core.attention.calls import PartialCall

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ScoreRule:
    """How a pair's score is made: q·k times `scale`, squashed to ±softcap if set; keys `window` or more above are hidden."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Operands:
    """What a call works on: q [n, H, d], k and v [m, Hk, d] are its slices of the row."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    call: PartialCall
    rule: ScoreRule


class Kernel(Protocol):
    """`lse` is float32 [H, n], infinite where there is no key."""

    def forward(self, on: Operands) -> Pair:
        """Output [n, H, d] and lse."""

    def backward(self, on: Operands, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        """Gradients of q, k and v."""


class TorchVarlen:
    """torch's own FlashAttention-2, the operators under torch.nn.attention.varlen."""

    def forward(self, on: Operands) -> Pair:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            on.q, on.k, on.v, *self._shape(on), 0.0, on.call.causal, False, **self._rule(on)
        )
        return out, lse

    def backward(self, on: Operands, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        seed = torch.zeros(2, dtype=torch.uint64, device=on.q.device)  # of dropout, which is off
        return torch.ops.aten._flash_attention_backward(
            grad, on.q, on.k, on.v, out, lse, *self._shape(on), 0.0, on.call.causal, seed,
            torch.empty(0, device=on.q.device), **self._rule(on),
        )  # fmt: skip

    @staticmethod
    def _shape(on: Operands) -> tuple[Any, ...]:
        return on.call.cu_q, on.call.cu_k, on.call.max_q, on.call.max_k

    @staticmethod
    def _rule(on: Operands) -> dict[str, Any]:
        left, right = _window(on.rule, None)
        return {"scale": on.rule.scale, "window_size_left": left, "window_size_right": right}


class FlashAttention4:
    """FlashAttention-4 in CuTe: the package flash-attn-4, or the hub kernel of the same interface."""

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    def forward(self, on: Operands) -> Pair:
        return self._interface._flash_attn_fwd(on.q, on.k, on.v, return_lse=True, **self._arguments(on))[:2]

    def backward(self, on: Operands, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        return self._interface._flash_attn_bwd(on.q, on.k, on.v, out, grad, lse, **self._arguments(on))[:3]

    @staticmethod
    def _arguments(on: Operands) -> dict[str, Any]:
        left, right = _window(on.rule, None)
        return {
            "cu_seqlens_q": on.call.cu_q,
            "cu_seqlens_k": on.call.cu_k,
            "max_seqlen_q": on.call.max_q,
            "max_seqlen_k": on.call.max_k,
            "softmax_scale": on.rule.scale,
            "causal": on.call.causal,
            "softcap": on.rule.softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
        }


class FlashAttention3:
    """FlashAttention-3 for Hopper: the hub kernel kernels-community/flash-attn3."""

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    def forward(self, on: Operands) -> Pair:
        call = on.call
        return self._interface._flash_attn_forward(
            on.q, on.k, on.v, cu_seqlens_q=call.cu_q, cu_seqlens_k=call.cu_k, max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k, **self._rule(on),
        )[:2]  # fmt: skip

    def backward(self, on: Operands, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        dq, dk, dv = torch.empty_like(on.q), torch.empty_like(on.k), torch.empty_like(on.v)
        call = on.call
        self._interface._flash_attn_backward(
            grad, on.q, on.k, on.v, out, lse, call.cu_q, call.cu_k, None, None, call.max_q, call.max_k, dq, dk, dv,
            **self._rule(on),
        )  # fmt: skip
        return dq, dk, dv

    @staticmethod
    def _rule(on: Operands) -> dict[str, Any]:
        return {
            "softmax_scale": on.rule.scale,
            "causal": on.call.causal,
            "window_size": _window(on.rule, -1),
            "softcap": on.rule.softcap or 0.0,
        }


def load_hub_kernel(repository: str, module: str = "") -> Any:
    """A kernel of the hub, or of its local cache. Raises OSError or ValueError where it has none for this machine."""
    from kernels import get_kernel

    found = get_kernel(repository)
    return importlib.import_module(f"{found.__name__}.{module}") if module else found


def _window(rule: ScoreRule, unbounded: Any) -> tuple[Any, Any]:
    """Keys to the left and right of a query that it sees, `unbounded` as the kernel says it."""
    return (unbounded, unbounded) if rule.window is None else (rule.window - 1, 0)
