"""The policy: loading it, and log-probabilities of chosen positions without keeping [tokens, vocabulary] logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer_core.attention.backends import choose_backend
from trainer_core.attention.interface import IMPLEMENTATION, check_attention, compute_dtype, uses_softcap
from trainer_core.attention.layout import TreeLayout
from trainer_core.packing.trie import PrefixTrie, TrieLayout, edge_keys

LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Size of one chunk of float32 logits. Each chunk reads the output matrix once more, so a GPU wants few."""


def load_policy(
    path: str, *, dtype: str, trust_remote_code: bool, init_kwargs: dict[str, Any] | None
) -> PreTrainedModel:
    """Load a causal language model ready for packed rows.

    Raises ValueError with one sentence when the path is no model, NotImplementedError when its architecture is not
    supported. The architecture is checked before the weights are read.
    """
    kwargs = dict(init_kwargs or {})
    if Path(path).is_absolute() and not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"model {path} does not exist or has no config.json; give a Hugging Face model folder or a hub id"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise ValueError(f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    check_attention(config)
    kwargs.setdefault("dtype", getattr(torch, dtype))
    kwargs.setdefault("attn_implementation", IMPLEMENTATION)
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)


@dataclass(frozen=True)
class ScoreRequest:
    """What to compute at U chosen positions of a row.

    `targets` [U] are the tokens they predict. `top_ids` [M, K] are further tokens to score; `owner` [M] says at which of
    the U positions. Logits are divided by `temperature`, as the sampler does. Sorted: owner is non-decreasing.
    """

    targets: torch.Tensor
    top_ids: torch.Tensor
    owner: torch.Tensor
    temperature: float


def install_scoring(model: PreTrainedModel) -> None:
    """Make the model's output layer answer a pending ScoreRequest instead of returning logits.

    Doing it inside the model's forward keeps wrappers (data parallel, autocast) in charge of the whole computation.
    Raises NotImplementedError when the output layer is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise NotImplementedError(
            f"the output layer of {type(model).__name__} is {type(head).__name__}; only a linear layer without bias is "
            "supported (leave lm_head out of the LoRA target modules)"
        )
    head.pending = None  # type: ignore[assignment]
    head.forward = partial(_head_forward, head)  # type: ignore[method-assign]


def _head_forward(head: Any, hidden: torch.Tensor) -> Any:
    request: ScoreRequest | None = head.pending
    if request is None:
        return nn.functional.linear(hidden, head.weight)
    head.pending = None
    return _Scores.apply(hidden[0], head.weight, request)


@dataclass
class Scores:
    """Scores of the trainer at U positions: log_probs [U] of the targets, entropy [U] (no gradient), top [M, K]."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    top_log_probs: torch.Tensor


def score_row(
    model: nn.Module,
    trie: TrieLayout,
    positions: torch.Tensor,
    request: ScoreRequest,
    backend: str,
) -> Scores:
    """Forward one packed row and score `positions` [U], which are sorted row indices.

    `model` may be wrapped; its output layer must have been prepared by `install_scoring`.
    """
    device = positions.device
    head = _output_layer(model)
    head.pending = request
    output = model(
        input_ids=torch.from_numpy(trie.input_ids)[None].to(device),
        position_ids=torch.from_numpy(trie.position_ids)[None].to(device),
        logits_to_keep=positions,
        tree_layout=TreeLayout(trie, device, backend),
        use_cache=False,
    )
    return Scores(*output.logits)


def _output_layer(model: Any) -> Any:
    while not hasattr(model, "get_output_embeddings"):
        model = model.module  # a data-parallel wrapper
    return model.get_output_embeddings()


def packed_log_probs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], backend: str | None = None
) -> list[np.ndarray]:
    """Log-probabilities of each sequence's tokens 1..T-1, float32 [T - 1], through one packed row.

    The model needs attn_implementation "offbeat_tree" (`load_policy` sets it). Raises ValueError on an empty sequence.
    """
    trie = PrefixTrie()
    keys = [edge_keys(np.asarray(sequence)) for sequence in sequences]
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("found an empty sequence; each needs at least one token")
    for item in keys:
        trie.insert(item)
    if not trie.tokens:
        return [np.zeros(0, np.float32) for _ in sequences]
    layout, places = trie.layout()
    if not hasattr(model.get_output_embeddings(), "pending"):
        install_scoring(model)
    device = next(model.parameters()).device
    targets = np.zeros(trie.tokens, np.int64)
    where = [places.of(item) for item in keys]
    for sequence, place in zip(sequences, where, strict=True):
        targets[place] = np.asarray(sequence)[1:]
    request = ScoreRequest(
        torch.from_numpy(targets).to(device),
        torch.zeros(0, 0, dtype=torch.long, device=device),
        torch.zeros(0, dtype=torch.long, device=device),
        1.0,
    )
    with torch.no_grad():
        positions = torch.arange(trie.tokens, device=device)
        name = choose_backend(device, compute_dtype(device, model.dtype), uses_softcap(model.config), backend)
        scores = score_row(model, layout, positions, request, name)
    log_probs = scores.log_probs.cpu().numpy()
    return [log_probs[place] for place in where]


class _Scores(torch.autograd.Function):
    """Log-probabilities from hidden states, chunk by chunk; the backward pass recomputes each chunk's logits.

    Works in the autocast dtype where autocast is on; everything after the matrix product is float32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, request: ScoreRequest
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        ctx.save_for_backward(hidden, weight)
        ctx.request, ctx.dtype = request, dtype
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        top = torch.empty(request.top_ids.shape, dtype=torch.float32, device=hidden.device)
        summarise = _fused(_normaliser_and_entropy, hidden)
        for rows, terms, logits in _logit_chunks(hidden, weight, request, dtype):
            normaliser, entropy[rows] = summarise(logits, request.temperature)
            scores = logits.gather(1, request.targets[rows, None])[:, 0].float() / request.temperature
            log_probs[rows] = scores - normaliser
            owner = request.owner[terms] - rows.start
            scores = logits[owner[:, None], request.top_ids[terms]].float() / request.temperature
            top[terms] = scores - normaliser[owner, None]
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, top

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_log_probs, _, grad_top = grads
        hidden, weight = ctx.saved_tensors
        request, dtype = ctx.request, ctx.dtype
        need_hidden, need_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        weight_cast = weight.to(dtype)
        share = _fused(_weighted_probabilities, hidden)
        for rows, terms, logits in _logit_chunks(hidden, weight, request, dtype):
            # d log p_v / d z = onehot(v) - p, so p is weighted by the sum of all gradients that arrive at a position.
            owner = request.owner[terms] - rows.start
            total = grad_log_probs[rows].index_add(0, owner, grad_top[terms].sum(dim=1))
            grad = share(logits, total / request.temperature, request.temperature)
            hit = grad_log_probs[rows, None] / request.temperature
            grad.scatter_add_(1, request.targets[rows, None], hit.to(dtype))
            hit = (grad_top[terms] / request.temperature).to(dtype)
            grad.index_put_((owner[:, None], request.top_ids[terms]), hit, accumulate=True)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight_cast).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[rows].to(dtype)).float()
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _logit_chunks(hidden: torch.Tensor, weight: torch.Tensor, request: ScoreRequest, dtype: torch.dtype) -> Any:
    """(positions, terms, logits before the temperature, as `dtype`) of each chunk of at most LOGIT_BYTES."""
    weight_cast = weight.to(dtype)
    size = max(1, LOGIT_BYTES[hidden.device.type] // (4 * weight.shape[0]))
    starts = range(0, len(hidden), size)
    edges = torch.tensor([*starts, len(hidden)], device=hidden.device)
    terms = torch.searchsorted(request.owner, edges).tolist()
    for number, start in enumerate(starts):
        rows = slice(start, min(start + size, len(hidden)))
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden[rows].to(dtype) @ weight_cast.T
        yield rows, slice(terms[number], terms[number + 1]), logits


def _normaliser_and_entropy(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp l and entropy l - Σ p·z of z = logits / temperature, float32, one value a row."""
    z = logits.float() / temperature
    normaliser = torch.logsumexp(z, dim=-1)
    log_p = z - normaliser[:, None]
    return normaliser, -(log_p.exp() * log_p).sum(-1)


def _weighted_probabilities(logits: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Minus `weight` times softmax(logits / temperature), in the precision of the logits."""
    return (torch.softmax(logits.float() / temperature, dim=-1) * -weight[:, None]).to(logits.dtype)


def _fused(function: Any, like: torch.Tensor) -> Any:
    """The function as one kernel on a GPU, where what it reads is gigabytes."""
    return _compiled(function) if like.is_cuda else function


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)
