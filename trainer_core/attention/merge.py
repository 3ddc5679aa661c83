"""Adding a further call's attention to what is there: one pass over memory on a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge `part` [n, H, d] with `part_lse` [H, n] into `out` and `lse`, in place.

    Kernels mark a query without keys by an infinite log-sum-exp of either sign; it keeps what `out` has.
    """
    if out.is_cuda:
        _merge_on_gpu(out, lse, part, part_lse)
        return
    part_lse = torch.where(part_lse.isinf(), -torch.inf, part_lse)
    # exp(b - log(exp(a) + exp(b))) = sigmoid(b - a)
    weight = torch.sigmoid(part_lse - lse).T[..., None]
    out.copy_(out + weight * (part - out))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _merge_on_gpu(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    rows, heads, width = out.shape
    kernel, block, next_power = _triton_kernel()
    grid = (-(-rows // block), heads)
    kernel[grid](
        out, lse, part, part_lse, rows, width, out.stride(0), out.stride(1), lse.stride(0), part.stride(0), part.stride(1),
        part_lse.stride(0), BLOCK=block, WIDTH=next_power(width),
    )  # fmt: skip


@cache
def _triton_kernel() -> tuple[Any, int, Any]:
    """Compiled at its first use; Triton is there wherever torch drives a GPU."""
    import triton

    from trainer_core.attention.merge_triton import merge_kernel

    return merge_kernel, 32, triton.next_power_of_2
