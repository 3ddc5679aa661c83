"""Whether the trainer computes the probabilities that the server samples from, judged by the first step of an attempt."""

from __future__ import annotations

import math
from collections.abc import Mapping

DIFFERENCE_FLOAT32 = 0.05
"""Nats of one token's log-probability. Two programs that compute in float32 differ by some 1e-3."""
DIFFERENCE_HALF = 1.5
"""As above where either computes in 16 bits, whose rounding an unlikely token amplifies."""
MISMATCH_KL = 0.02
"""Nats; healthy runs in bfloat16 have about 0.001 (docs/gpu-runs.md)."""


def warning(values: Mapping[str, float], trainer: str, server: str | None) -> str | None:
    """A sentence when the first step's metrics say that trainer and server disagree; None when they agree.

    `trainer` and `server` name the precisions they compute in, as "float32"; None where the server did not say.
    """
    float32 = (trainer, server) == ("float32", "float32")
    limit = DIFFERENCE_FLOAT32 if float32 else DIFFERENCE_HALF
    difference = values.get("sampling/step0_max_abs_diff", math.nan)
    mismatch = values.get("sampling/mismatch_kl", math.nan)
    found = []
    if difference > limit:
        found.append(f"a log-probability differs by {difference:.2g} (expected: below {limit:g})")
    if mismatch > MISMATCH_KL:
        found.append(f"mismatch_kl is {mismatch:.2g} nats (expected: below {MISMATCH_KL:g})")
    if not found:
        return None
    precisions = f"the precisions (trainer {trainer}, server {server or 'unknown'}; try float32 on both sides), "
    return (
        f"Trainer and server disagree on tokens that were sampled with the same weights: {' and '.join(found)}. Look at "
        f"{'' if float32 else precisions}whether the server serves this very model, its chat template, and its --logprobs-mode "
        "(processed_logprobs)."
    )
