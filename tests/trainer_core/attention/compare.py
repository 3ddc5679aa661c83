"""Packed rows against each sequence alone: log-probabilities and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tests.trainer_core.attention.models import set_implementation
from trainer_core.model import sequence_log_probs

# transformers computes the delta rule by chunks and in float32 whatever the model's precision, and a row's chunks begin
# elsewhere than a sequence's. Gradients of its gates are sums of large terms that nearly cancel. That the rule on the tree is
# exact is what test_delta.py shows, to 1e-10 in float64.
GATES = ("A_log", "dt_bias")


def gradient_limit(model: Any, name: str) -> float:
    if "linear_attention" not in (getattr(model.config.get_text_config(), "layer_types", None) or []):
        return 1e-5
    return 3e-4 if name.endswith(GATES) else 3e-5


def alone(model: Any, sequence: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of tokens 1.., the model as transformers has it, without anything else in its batch."""
    tokens = torch.tensor(np.asarray(sequence), device=next(model.parameters()).device)[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def assert_packed_is_alone(
    model: Any, batch: Sequence[Sequence[int]], backend: str = "sdpa", *, seed: int = 0, gradients: bool = True
) -> None:
    """Within 1e-5: log-probabilities, and gradients in units of each parameter's largest (of 1 where that is less).

    Gradients of models with Gated DeltaNet are held to `gradient_limit`.

    The gradients are those of a random weighted sum of all log-probabilities.
    """
    rng = np.random.default_rng(seed)
    device = next(model.parameters()).device
    weights = [torch.tensor(rng.normal(size=len(sequence) - 1), device=device).float() for sequence in batch]
    with torch.set_grad_enabled(gradients):
        set_implementation(model, packed=False)
        expected, expected_grads = _run(model, weights, (alone(model, one) for one in batch), gradients)
        set_implementation(model, packed=True)
        found, grads = _run(model, weights, sequence_log_probs(model, batch, backend), gradients)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0, msg=lambda text, n=number: f"sequence {n}: {text}")
    for name, parameter in model.named_parameters():
        nothing = torch.zeros_like(parameter)
        mine, theirs = grads.get(name, nothing), expected_grads.get(name, nothing)
        scale = max(1.0, float(theirs.abs().max()))
        limit = gradient_limit(model, name)
        torch.testing.assert_close(
            mine / scale, theirs / scale, atol=limit, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def _run(
    model: Any, weights: list[torch.Tensor], log_probs: Iterable[torch.Tensor], gradients: bool
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model.zero_grad()
    values = list(log_probs)
    if gradients:
        total = sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
        if isinstance(total, torch.Tensor) and total.requires_grad:
            total.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return [value.detach() for value in values], grads
