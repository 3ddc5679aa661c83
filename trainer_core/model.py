"""The policy: loading it, and log-probabilities of packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from trainer_core.attention.backends import choose_backend
from trainer_core.attention.interface import IMPLEMENTATION, compute_dtype, uses_softcap
from trainer_core.attention.layout import TreeLayout
from trainer_core.families import check_model, freeze_all_but_text, model_class
from trainer_core.packing.trie import PrefixTrie, TrieLayout
from trainer_core.scoring import ScoreRequest, Scores, answering, install_scoring
from trainer_core.transfer import to_device


def load_policy(
    path: str, *, dtype: str, trust_remote_code: bool, init_kwargs: dict[str, Any] | None
) -> PreTrainedModel:
    """Load a causal language model ready for packed rows. Of one that sees images only the text tower has gradients.

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
    check_model(config)
    kwargs.setdefault("dtype", getattr(torch, dtype))
    kwargs.setdefault("attn_implementation", IMPLEMENTATION)
    model = model_class(config).from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    freeze_all_but_text(model)
    return model


def score_row(
    model: nn.Module,
    trie: TrieLayout,
    positions: torch.Tensor,
    request: ScoreRequest,
    backend: str,
    router: bool = False,
) -> Scores:
    """Forward one packed row and score `positions` [U], which are sorted row indices.

    `model` may be wrapped; its output layer must have been prepared by `install_scoring`. `router` asks for the router's
    logits, which only a model with experts has.
    """
    device = positions.device
    owner = _with_output_layer(model)
    wanted = {"output_router_logits": True} if router else {}
    with answering(owner.get_output_embeddings(), owner.config, request):
        output = model(
            input_ids=to_device(trie.input_ids[None], device),
            position_ids=to_device(trie.position_ids[None], device),
            logits_to_keep=positions,
            tree_layout=TreeLayout(trie, device, backend),
            use_cache=False,
            **wanted,
        )
    log_probs, entropy, top_log_probs = output.logits
    return Scores(log_probs, entropy, top_log_probs, tuple(output.router_logits) if router else ())


def _with_output_layer(model: Any) -> Any:
    while not hasattr(model, "get_output_embeddings"):
        model = model.module  # a data-parallel wrapper
    return model


def packed_log_probs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], backend: str | None = None
) -> list[np.ndarray]:
    """Log-probabilities of each sequence's tokens 1..T-1, float32 [T - 1], through one packed row.

    Sequences may repeat or be prefixes of one another; one of a single token gives an empty array. `backend` names an
    attention backend, None takes the best for the model's device. Any attn_implementation is kept for other calls. Raises
    ValueError on a sequence that is empty or no list of token ids of the model, and on a backend that cannot be had;
    NotImplementedError on a model that is not supported.
    """
    check_model(model.config)
    implementation = model.config._attn_implementation
    if implementation != IMPLEMENTATION:
        model.set_attn_implementation(IMPLEMENTATION)
    try:
        with torch.no_grad():
            return [log_probs.cpu().numpy() for log_probs in sequence_log_probs(model, sequences, backend)]
    finally:
        if implementation != IMPLEMENTATION:
            model.set_attn_implementation(implementation)


def sequence_log_probs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], backend: str | None = None
) -> list[torch.Tensor]:
    """As `packed_log_probs`, but tensors on the model's device, with gradient where it is enabled.

    The model's attn_implementation must be `IMPLEMENTATION`, and stay so until the backward pass is done.
    """
    arrays = [_token_array(sequence, index, model) for index, sequence in enumerate(sequences)]
    trie = PrefixTrie()
    leaves = [trie.insert(tokens) for tokens in arrays]
    device = next(model.parameters()).device
    if not trie.tokens:
        return [torch.zeros(0, device=device) for _ in arrays]
    if not hasattr(model.get_output_embeddings(), "pending"):
        install_scoring(model)
    layout = trie.layout()
    places = []
    targets = np.zeros(trie.tokens, np.int64)
    for tokens, leaf in zip(arrays, leaves, strict=True):
        ranges = trie.ranges(leaf, len(tokens) - 1)[::-1]
        places.append(np.concatenate([np.arange(at, at + length) for at, _, length in ranges] or [tokens[:0]]))
        targets[places[-1]] = tokens[1:]
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    no_terms = np.zeros(trie.tokens + 1, np.int64)
    request = ScoreRequest(to_device(targets, device), nothing.reshape(0, 0), nothing, no_terms, 1.0)
    name = choose_backend(device, compute_dtype(device, model.dtype), uses_softcap(model.config), backend)
    log_probs = score_row(model, layout, torch.arange(trie.tokens, device=device), request, name).log_probs
    return [log_probs[to_device(place, device)] for place in places]


def _token_array(sequence: Sequence[int], index: int, model: PreTrainedModel) -> np.ndarray:
    """A sequence as int64 [T]. Raises ValueError naming it where it is none."""
    tokens = np.asarray(sequence)
    if tokens.ndim == 1 and not len(tokens):
        raise ValueError(f"sequence {index} is empty; each needs at least one token")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"sequence {index} is an array of {tokens.dtype} {tokens.shape}; a list of token ids is needed"
        )
    vocabulary: int = model.config.get_text_config().vocab_size
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        outside = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ValueError(f"sequence {index} holds the token id {outside}; the model has 0 to {vocabulary - 1}")
    return tokens.astype(np.int64)
