"""Tree attention by partial calls of a kernel, without copies of keys or values.

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

from trainer_core.attention.calls import PartialCall
from trainer_core.attention.kernels import Kernel, ScoreRule
from trainer_core.attention.layout import TreeLayout
from trainer_core.attention.merge import merge_


def flash_tree_attention(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, rule: ScoreRule
) -> torch.Tensor:
    """Attention output [1, N, query heads, d] of query [1, query heads, N, d], key and value [1, key heads, N, d].

    A window that hides something cuts each path at another place, which no split into few calls can express: then the keys
    of each path are gathered, at most `window` of them for a chain.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    rule = ScoreRule(rule.scale, layout.effective_window(rule.window), rule.softcap)
    if rule.window is None:
        return _Calls.apply(q, k, v, layout.partial_calls, kernel, rule)[None]
    gathered = layout.gathered_call(rule.window)
    k, v = _Gather.apply(k, gathered.index), _Gather.apply(v, gathered.index)
    return _Calls.apply(q, k, v, [gathered.call], kernel, rule)[None]


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
        out, lse = kernel.forward(q, k, v, calls[0], rule)
        for call in calls[1:]:
            part, part_lse = kernel.forward(q[call.queries], k[call.keys], v[call.keys], call, rule)
            merge_(out[call.queries], lse[:, call.queries], part, part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.kernel, ctx.rule = calls, kernel, rule
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, lse, ctx.calls[0], ctx.rule)
        for call in ctx.calls[1:]:
            at, to = call.queries, call.keys
            part_q, part_k, part_v = ctx.kernel.backward(
                grad[at], q[at], k[to], v[to], out[at], lse[:, at].contiguous(), call, ctx.rule
            )
            dq[at].add_(part_q)
            dk[to].add_(part_k)
            dv[to].add_(part_v)
        return dq, dk, dv, None, None, None


class _Gather(torch.autograd.Function):
    """Rows of a tensor, repeated; gradients add up in float32 at least."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.shape = values.shape
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grads[0].device)
        return total.index_add_(0, index, grads[0].to(wide)).to(grads[0].dtype), None
