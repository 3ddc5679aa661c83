"""The Triton kernel of trainer_core.scoring: what it needs of a row of logits, in one pass over them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normaliser_kernel(  # type: ignore[no-untyped-def]
    logits, normaliser, entropy, width, row_stride, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    """Program i: log-sum-exp l and entropy l - Σ p·z of row i, z = logits / temperature; sums in float32.

    Each lane keeps its own running maximum m, Σ exp(z - m) and Σ z·exp(z - m) (online softmax, arXiv 1805.02867); the lanes
    are brought together at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        z = (
            tl.load(logits + row * row_stride + start + lane, mask=inside, other=0.0).to(tl.float32)
            * inverse_temperature
        )
        larger = tl.where(inside, tl.maximum(largest, z), largest)
        shrink = tl.exp(largest - larger)
        weight = tl.where(inside, tl.exp(z - larger), 0.0)
        total = total * shrink + weight
        weighted = weighted * shrink + weight * z
        largest = larger
    top = tl.max(largest, 0)
    shrink = tl.exp(largest - top)
    sum_of = tl.sum(total * shrink, 0)
    log_sum = top + tl.log(sum_of)
    tl.store(normaliser + row, log_sum)
    tl.store(entropy + row, log_sum - tl.sum(weighted * shrink, 0) / sum_of)
