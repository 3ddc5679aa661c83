"""Triton kernels of trainer_core.attention.merge: sums in float32, each value read and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    out, lse, part, part_lse, rows, width, out_row, out_head, lse_head, part_row, part_head, part_lse_head,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (i, h): rows i·BLOCK.. of head h. `out`, `part` are [rows, heads, width]; both lse [heads, rows], stride 1."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    inside = row < rows
    old = tl.load(lse + head * lse_head + row, mask=inside, other=0.0)
    new = tl.load(part_lse + head * part_lse_head + row, mask=inside, other=float("-inf"))
    empty = (new == float("inf")) | (new == float("-inf"))
    gap = tl.where(empty, -1e30, new - old)
    weight = tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp(-gap)))
    # log(exp(old) + exp(new)), with the larger one taken out
    merged = tl.maximum(old, tl.where(empty, old, new)) + tl.log(1.0 + tl.exp(-tl.abs(gap)))
    tl.debug_barrier()  # the warps of a program share these rows: all must have read before one writes
    tl.store(lse + head * lse_head + row, merged, mask=inside)
    column = tl.arange(0, WIDTH)
    cell = inside[:, None] & (column < width)[None, :]
    target = out + row[:, None].to(tl.int64) * out_row + head * out_head + column[None, :]
    source = part + row[:, None].to(tl.int64) * part_row + head * part_head + column[None, :]
    have = tl.load(target, mask=cell, other=0.0).to(tl.float32)
    add = tl.load(source, mask=cell, other=0.0).to(tl.float32)
    # a row without keys may hold anything in `part`
    result = tl.where(weight[:, None] > 0, have + weight[:, None] * (add - have), have)
    tl.store(target, result.to(out.dtype.element_ty), mask=cell)


@triton.jit
def add_copies_kernel(total, grads, copies, first_copy, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program j: total[j] = the sum of grads[c] over the copies c of row j; rows are contiguous, `size` long."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < size
    sum_of = tl.zeros([SIZE], dtype=tl.float32)
    for place in range(tl.load(first_copy + row), tl.load(first_copy + row + 1)):
        copy = tl.load(copies + place)
        sum_of += tl.load(grads + copy * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * size + column, sum_of.to(total.dtype.element_ty), mask=inside)
