"""Tree attention by partial calls of a kernel, merged; without copies of keys or values wherever that is faster.

Let a query's keys be split over calls, call c giving the output o_c and the log-sum-exp l_c of its scores. Then

    l = log Σ_c exp(l_c),   o = Σ_c exp(l_c - l)·o_c

is attention over all of them (FlashAttention, arXiv 2205.14135, section 3.1). A kernel's backward pass needs of its forward
pass only o, l and the inputs: with P_ij = exp(s_ij - l_i) and D_i = grad_i·o_i it computes

    dv_j = Σ_i P_ij·grad_i,   ds_ij = P_ij·(grad_i·v_j - D_i),   dq_i = Σ_j ds_ij·k_j,   dk_j = Σ_i ds_ij·q_i

(the same paper, appendix B.4). All of them are sums over pairs, so running it call by call with the *merged* o and l and
adding up gives the exact gradient, as ring attention does (arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch

from trainer_core.attention.calls import GatheredCall, PartialCall
from trainer_core.attention.kernels import Kernel, Operands, ScoreRule
from trainer_core.attention.layout import TreeLayout
from trainer_core.attention.merge import add_copies, merge_


def flash_tree_attention(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, rule: ScoreRule
) -> torch.Tensor:
    """Attention output [1, N, query heads, d] of query [1, query heads, N, d], key and value [1, key heads, N, d].

    Two layouts in which keys are gathered after all, each path's for itself: under a window that hides something, since it
    cuts each path at another place, which no split into few calls can express; and where the shared parts are so short
    next to the branches that copying them costs less than a second pass over the branches' queries.
    """
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    rule = ScoreRule(rule.scale, layout.effective_window(rule.window), rule.softcap)
    if rule.window is None and not layout.gathering_pays:
        return _Calls.apply(q, k, v, layout.partial_calls, kernel, rule).unsqueeze(0)
    return _Gathered.apply(q, k, v, layout.gathered_call(rule.window), kernel, rule).unsqueeze(0)


class _Calls(torch.autograd.Function):
    """The first call covers all queries and keys; the others add further keys for slices of the queries."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        calls: list[PartialCall],
        kernel: Kernel,
        rule: ScoreRule,
    ) -> torch.Tensor:
        out, lse = kernel.forward(Operands(q, k, v, calls[0], rule))
        for call in calls[1:]:
            part, part_lse = kernel.forward(_part(q, k, v, call, rule))
            merge_(out[call.queries], lse[:, call.queries], part, part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.kernel, ctx.rule = calls, kernel, rule
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = ctx.kernel.backward(Operands(q, k, v, ctx.calls[0], ctx.rule), grad, out, lse)
        for call in ctx.calls[1:]:
            at, to = call.queries, call.keys
            on = _part(q, k, v, call, ctx.rule)
            part_q, part_k, part_v = ctx.kernel.backward(on, grad[at], out[at], lse[:, at].contiguous())
            dq[at].add_(part_q)
            dk[to].add_(part_k)
            dv[to].add_(part_v)
        return dq, dk, dv, None, None, None


def _part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PartialCall, rule: ScoreRule) -> Operands:
    """A call's slices of the row."""
    return Operands(q[call.queries], k[call.keys], v[call.keys], call, rule)


class _Gathered(torch.autograd.Function):
    """One call on copies of keys and values, which are made again in the backward pass rather than kept."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gathered: GatheredCall,
        kernel: Kernel,
        rule: ScoreRule,
    ) -> torch.Tensor:
        keys, values = k.index_select(0, gathered.index), v.index_select(0, gathered.index)
        out, lse = kernel.forward(Operands(q, keys, values, gathered.call, rule))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gathered, ctx.kernel, ctx.rule = gathered, kernel, rule
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        gathered: GatheredCall = ctx.gathered
        keys, values = k.index_select(0, gathered.index), v.index_select(0, gathered.index)
        grad = grads[0].contiguous()
        dq, dk, dv = ctx.kernel.backward(Operands(q, keys, values, gathered.call, ctx.rule), grad, out, lse)
        return dq, add_copies(dk, gathered), add_copies(dv, gathered), None, None, None
