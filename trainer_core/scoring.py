"""Log-probabilities of chosen positions without keeping [tokens, vocabulary] logits."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trainer_core.attention.delta import install_tree_rules

LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Size of one chunk of float32 logits. Each chunk reads the output matrix once more, so a GPU wants few."""

SOFTCAP = "final_logit_softcapping"
"""Setting of a model that squashes its logits z to softcap·tanh(z / softcap) (Gemma 2, arXiv 2408.00118, section 2)."""


@dataclass(frozen=True)
class ScoreRequest:
    """What to compute at U chosen positions of a row.

    `targets` [U] are the tokens they predict. `top_ids` [M, K] are further tokens to score; `owner` [M] says at which of
    the U positions. Sorted: owner is non-decreasing, and the terms of position u are first_terms[u]..first_terms[u+1]-1;
    `first_terms` [U + 1] is the host's, which need not wait for the GPU then. Logits are divided by `temperature`, as the
    sampler does.
    """

    targets: torch.Tensor
    top_ids: torch.Tensor
    owner: torch.Tensor
    first_terms: np.ndarray
    temperature: float


def install_scoring(model: PreTrainedModel) -> None:
    """Make a model ready for packed rows.

    Its output layer answers a pending ScoreRequest instead of returning logits; doing it inside the model's forward keeps
    wrappers (data parallel, autocast) in charge of the whole computation. Recurrent layers learn to follow the tree. Raises
    NotImplementedError when the output layer is not a plain linear layer.
    """
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise NotImplementedError(
            f"the output layer of {type(model).__name__} is {type(head).__name__}; only a linear layer without bias is "
            "supported (leave lm_head out of the LoRA target modules)"
        )
    install_tree_rules(model)
    head.pending = None
    head.softcap = getattr(model.config.get_text_config(), SOFTCAP, None)
    head.forward = partial(_head_forward, head)


def _head_forward(head: Any, hidden: torch.Tensor) -> Any:
    request: ScoreRequest | None = head.pending
    if request is None:
        return nn.functional.linear(hidden, head.weight)
    head.pending = None
    return _Scores.apply(hidden[0], head.weight, request, head.softcap)


@contextmanager
def answering(head: Any, config: PretrainedConfig, request: ScoreRequest) -> Iterator[None]:
    """While it lasts, the model's forward gives the request's scores in place of logits.

    A model that squashes its logits does so after its output layer, to what would then be scores; the layer does it itself.
    """
    text = config.get_text_config()
    if head.softcap is not None:
        setattr(text, SOFTCAP, None)
    head.pending = request
    try:
        yield
    finally:
        head.pending = None
        if head.softcap is not None:
            setattr(text, SOFTCAP, head.softcap)


@dataclass
class Scores:
    """Scores of the trainer at U positions: log_probs [U] of the targets, entropy [U] (no gradient), top [M, K].

    `router_logits` are those of each layer with experts, [N, experts], where they were asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    top_log_probs: torch.Tensor
    router_logits: tuple[torch.Tensor, ...] = ()


class _Scores(torch.autograd.Function):
    """Log-probabilities from hidden states, chunk by chunk; the backward pass recomputes each chunk's logits.

    Works in the autocast dtype where autocast is on; everything after the matrix product is float32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, request: ScoreRequest, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        ctx.request, ctx.dtype, ctx.softcap = request, dtype, softcap
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        top = torch.empty(request.top_ids.shape, dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty_like(log_probs)
        for rows, terms, logits in _logit_chunks(hidden, weight, request, dtype, softcap):
            normaliser[rows], entropy[rows] = _normaliser_and_entropy(logits, request.temperature)
            scores = logits.gather(1, request.targets[rows, None])[:, 0].float() / request.temperature
            log_probs[rows] = scores - normaliser[rows]
            owner = request.owner[terms] - rows.start
            scores = logits[owner[:, None], request.top_ids[terms]].float() / request.temperature
            top[terms] = scores - normaliser[rows][owner, None]
        ctx.save_for_backward(hidden, weight, normaliser)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, top

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_log_probs, _, grad_top = grads
        hidden, weight, normaliser = ctx.saved_tensors
        request, dtype, softcap = ctx.request, ctx.dtype, ctx.softcap
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        weight_cast = weight.to(dtype)
        share = _fused(_weighted_probabilities, hidden)
        for rows, terms, logits in _logit_chunks(hidden, weight, request, dtype, softcap):
            # d log p_v / d z = onehot(v) - p, so p is weighted by the sum of all gradients that arrive at a position.
            owner = request.owner[terms] - rows.start
            total = grad_log_probs[rows].index_add(0, owner, grad_top[terms].sum(dim=1))
            grad = share(logits, normaliser[rows], total / request.temperature, request.temperature)
            hit = grad_log_probs[rows, None] / request.temperature
            grad.scatter_add_(1, request.targets[rows, None], hit.to(dtype))
            hit = (grad_top[terms] / request.temperature).to(dtype)
            grad.index_put_((owner[:, None], request.top_ids[terms]), hit, accumulate=True)
            if softcap is not None:  # d softcap·tanh(z / softcap) / dz = 1 - tanh²
                grad *= 1 - (logits / softcap) ** 2
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight_cast).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.add_(grad.T @ hidden[rows].to(dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _logit_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, request: ScoreRequest, dtype: torch.dtype, softcap: float | None
) -> Any:
    """(positions, terms, logits before the temperature, as `dtype`) of each chunk of at most LOGIT_BYTES."""
    weight_cast = weight.to(dtype)
    size = max(1, LOGIT_BYTES[hidden.device.type] // (4 * weight.shape[0]))
    starts = range(0, len(hidden), size)
    for start in starts:
        rows = slice(start, min(start + size, len(hidden)))
        terms = slice(int(request.first_terms[rows.start]), int(request.first_terms[rows.stop]))
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden[rows].to(dtype) @ weight_cast.T
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
        yield rows, terms, logits


def _normaliser_and_entropy(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp l and entropy l - Σ p·z of z = logits / temperature, float32, one value a row."""
    if logits.is_cuda:
        return _on_gpu(logits, temperature)
    z = logits.float() / temperature
    normaliser = torch.logsumexp(z, dim=-1)
    log_p = z - normaliser[:, None]
    return normaliser, -(log_p.exp() * log_p).sum(-1)


def _on_gpu(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    normaliser = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(normaliser)
    _kernels().normaliser_kernel[(len(logits),)](
        logits, normaliser, entropy, logits.shape[1], logits.stride(0), 1 / temperature, BLOCK=1024
    )
    return normaliser, entropy


@cache
def _kernels() -> Any:
    """Imported at first use: Triton is there wherever torch drives a GPU, and only there."""
    return importlib.import_module("trainer_core.scoring_triton")


def _weighted_probabilities(
    logits: torch.Tensor, normaliser: torch.Tensor, weight: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Minus `weight` times softmax(logits / temperature), in the precision of the logits."""
    return ((logits.float() / temperature - normaliser[:, None]).exp() * -weight[:, None]).to(logits.dtype)


def _fused(function: Any, like: torch.Tensor) -> Any:
    """The function as one kernel on a GPU, where what it reads is gigabytes."""
    return _compiled(function) if like.is_cuda else function


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
