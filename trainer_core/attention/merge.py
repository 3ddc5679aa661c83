"""Adding up what several calls, or several copies of a key, contribute: one pass over memory on a GPU."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from trainer_core.attention.calls import GatheredCall


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
    triton, kernels = _triton()
    block = 32
    kernels.merge_kernel[(-(-rows // block), heads)](
        out, lse, part, part_lse, rows, width, out.stride(0), out.stride(1), lse.stride(0), part.stride(0), part.stride(1),
        part_lse.stride(0), BLOCK=block, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip


def add_copies(grads: torch.Tensor, gathered: GatheredCall) -> torch.Tensor:
    """Sum [N, H, d] over the copies [K, H, d] of each row position, in float32 at least and in a fixed order."""
    rows, (heads, width) = len(gathered.first_copy) - 1, grads.shape[1:]
    if not grads.is_cuda:
        total = grads.new_zeros(rows, heads, width, dtype=torch.promote_types(grads.dtype, torch.float32))
        return total.index_add_(0, gathered.index, grads.to(total.dtype)).to(grads.dtype)
    triton, kernels = _triton()
    grads = grads.contiguous()
    total = grads.new_empty(rows, heads, width)
    size = heads * width
    kernels.add_copies_kernel[(rows,)](
        total, grads, gathered.copies, gathered.first_copy, size, SIZE=triton.next_power_of_2(size)
    )
    return total


@cache
def _triton() -> tuple[Any, Any]:
    """Imported at first use: Triton is there wherever torch drives a GPU, and only there."""
    return importlib.import_module("triton"), importlib.import_module("trainer_core.attention.merge_triton")
