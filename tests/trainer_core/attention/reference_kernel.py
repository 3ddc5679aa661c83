"""A partial kernel in plain torch: what FlashAttention computes, in any precision and on any device."""

from __future__ import annotations

from itertools import pairwise

import torch

from trainer_core.attention.calls import PartialCall
from trainer_core.attention.kernels import Operands, Pair, ScoreRule, Triple


class ReferenceKernel:
    """Marks queries without keys as FlashAttention-2 does, by +inf. `calls` counts forward calls, `pairs` what they see."""

    def __init__(self) -> None:
        self.calls = 0
        self.pairs = 0

    def forward(self, on: Operands) -> Pair:
        self.calls += 1
        q, k, v, rule = on.q, on.k, on.v, on.rule
        out = torch.zeros_like(q)
        lse = torch.full((q.shape[1], len(q)), torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys, seen in _sequences(on.call, rule):
            if not keys.stop - keys.start or not rows.stop - rows.start:
                continue
            self.pairs += int(seen.sum())
            scores = _scores(q[rows], k[keys], seen, rule)[0]
            lse[:, rows] = torch.logsumexp(scores, -1).to(lse.dtype)
            weights = torch.softmax(scores, -1)
            out[rows] = torch.einsum("hij,jhd->ihd", weights, _spread(v[keys], q))
        return out, lse

    def backward(self, on: Operands, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        q, k, v, rule = on.q, on.k, on.v, on.rule
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad * out).sum(-1)
        for rows, keys, seen in _sequences(on.call, rule):
            if not keys.stop - keys.start or not rows.stop - rows.start:
                continue
            scores, slope = _scores(q[rows], k[keys], seen, rule)
            p = (scores - lse[:, rows, None]).exp()
            spread_v, spread_k = _spread(v[keys], q), _spread(k[keys], q)
            ds = (
                p * (torch.einsum("ihd,jhd->hij", grad[rows], spread_v) - delta[rows].T[..., None]) * slope * rule.scale
            )
            dq[rows] = torch.einsum("hij,jhd->ihd", ds, spread_k)
            for total, spread in (
                (dv, torch.einsum("hij,ihd->jhd", p, grad[rows])),
                (dk, torch.einsum("hij,ihd->jhd", ds, q[rows])),
            ):
                total[keys] = spread.reshape(keys.stop - keys.start, k.shape[1], -1, k.shape[2]).sum(2)
        return dq, dk, dv


def _sequences(call: PartialCall, rule: ScoreRule) -> list[tuple[slice, slice, torch.Tensor]]:
    found = []
    edges_q, edges_k = call.cu_q.tolist(), call.cu_k.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(edges_q), pairwise(edges_k), strict=True):
        # bottom-right alignment: the last query stands at the last key
        ahead = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)[None, :]
        seen = ahead >= 0 if call.causal else torch.ones_like(ahead, dtype=torch.bool)
        if rule.window is not None:
            seen &= ahead < rule.window
        found.append((slice(q0, q1), slice(k0, k1), seen))
    return found


def _scores(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, rule: ScoreRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [H, i, j] with -inf where hidden, and the derivative of the softcap."""
    raw = torch.einsum("ihd,jhd->hij", q, _spread(k, q)) * rule.scale
    if rule.softcap is None:
        return raw.masked_fill(~seen, -torch.inf), torch.ones_like(raw)
    squashed = torch.tanh(raw / rule.softcap)
    return (rule.softcap * squashed).masked_fill(~seen, -torch.inf), 1 - squashed**2


def _spread(heads: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1)
