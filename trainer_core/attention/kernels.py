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


class Kernel(Protocol):
    """q [n, H, d], k and v [m, Hk, d] are the call's slices; lse is float32 [H, n], infinite where there is no key."""

    softcap: bool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PartialCall, rule: ScoreRule) -> Pair:
        """Output [n, H, d] and lse."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: PartialCall,
        rule: ScoreRule,
    ) -> Triple:
        """Gradients of q, k and v."""


class TorchVarlen:
    """torch's own FlashAttention-2, the operators under torch.nn.attention.varlen."""

    softcap = False

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PartialCall, rule: ScoreRule) -> Pair:
        left, right = _window(call, rule)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False,
            scale=rule.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: PartialCall,
        rule: ScoreRule,
    ) -> Triple:
        left, right = _window(call, rule)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, seed,
            torch.empty(0, device=q.device), scale=rule.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip


class FlashAttention4:
    """FlashAttention-4 in CuTe: the package flash-attn-4, or the hub kernel of the same interface."""

    softcap = True

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PartialCall, rule: ScoreRule) -> Pair:
        return self._interface._flash_attn_fwd(q, k, v, return_lse=True, **self._arguments(call, rule))[:2]

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: PartialCall,
        rule: ScoreRule,
    ) -> Triple:
        return self._interface._flash_attn_bwd(q, k, v, out, grad, lse, **self._arguments(call, rule))[:3]

    def _arguments(self, call: PartialCall, rule: ScoreRule) -> dict[str, Any]:
        return {
            "cu_seqlens_q": call.cu_q,
            "cu_seqlens_k": call.cu_k,
            "max_seqlen_q": call.max_q,
            "max_seqlen_k": call.max_k,
            "softmax_scale": rule.scale,
            "causal": call.causal,
            "softcap": rule.softcap or 0.0,
            "window_size_left": None if rule.window is None else rule.window - 1,
            "window_size_right": None if rule.window is None else 0,
        }


class FlashAttention3:
    """FlashAttention-3 for Hopper: the hub kernel kernels-community/flash-attn3."""

    softcap = True

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PartialCall, rule: ScoreRule) -> Pair:
        return self._interface._flash_attn_forward(
            q, k, v, cu_seqlens_q=call.cu_q, cu_seqlens_k=call.cu_k, max_seqlen_q=call.max_q, max_seqlen_k=call.max_k,
            softmax_scale=rule.scale, causal=call.causal, window_size=_window_pair(call, rule), softcap=rule.softcap or 0.0,
        )[:2]  # fmt: skip

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: PartialCall,
        rule: ScoreRule,
    ) -> Triple:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._interface._flash_attn_backward(
            grad, q, k, v, out, lse, call.cu_q, call.cu_k, None, None, call.max_q, call.max_k, dq, dk, dv,
            softmax_scale=rule.scale, causal=call.causal, window_size=_window_pair(call, rule), softcap=rule.softcap or 0.0,
        )  # fmt: skip
        return dq, dk, dv


def load_hub_kernel(repository: str, module: str = "") -> Any:
    """A kernel of the hub, or of its local cache. Raises OSError or ValueError where it has none for this machine."""
    from kernels import get_kernel

    found = get_kernel(repository)
    return importlib.import_module(f"{found.__name__}.{module}") if module else found


def _window(call: PartialCall, rule: ScoreRule) -> tuple[int | None, int | None]:
    """Window to the left and right of a query, None for none."""
    return (None, None) if rule.window is None else (rule.window - 1, 0)


def _window_pair(call: PartialCall, rule: ScoreRule) -> tuple[int, int]:
    return (-1, -1) if rule.window is None else (rule.window - 1, 0)
