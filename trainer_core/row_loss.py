"""One packed row through the model: from its arrays to the tensors of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from trainer_core.loss import LossInputs, load_balancing, over_support
from trainer_core.model import score_row
from trainer_core.packing.collator import PackedRow
from trainer_core.scoring import ScoreRequest, Scores
from trainer_core.transfer import to_device


def loss_inputs(
    model: Any,
    row: PackedRow,
    *,
    device: torch.device,
    backend: str,
    temperature: float,
    weight_version: int,
    reference: Any = None,
    experts_per_token: int = 0,
) -> LossInputs:
    """Forward the row and gather what the loss needs of its M terms, in the order of their positions.

    Positions that several samples share are scored once. `weight_version` is the current one. `reference` is a model
    for the KL term; a PeftModel stands for its base model, with the adapter off. `experts_per_token`, where not 0, asks for
    the load-balancing loss of a model with experts.
    """
    positions, first, owner = np.unique(row.token_index, return_index=True, return_inverse=True)
    targets = row.target_ids[first]
    if not row.terms:  # filler: one position is scored, so that the row is part of the graph, and no term refers to it
        positions, targets = np.zeros(1, np.int64), np.zeros(1, np.int64)
    order = np.argsort(owner, kind="stable")

    def move(array: np.ndarray) -> torch.Tensor:
        return to_device(array, device)

    at, support = move(positions), move(row.support_ids[order])
    # The support is scored beside the top tokens; what pads it is any token, and is masked out again.
    ids = torch.cat([move(row.top_ids[order]), support.clamp(min=0)], dim=1)
    first_terms = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(positions)))])
    request = ScoreRequest(move(targets), ids, move(owner[order]), first_terms, temperature)
    terms = _Terms(request, support, row.top_ids.shape[1])
    scores = score_row(model, row.layout, at, request, backend, router=experts_per_token > 0)
    log_probs, top_log_probs, entropy = terms.of(scores)
    router_loss = None
    if experts_per_token:
        router_loss = load_balancing(scores.router_logits, experts_per_token, move(row.multiplicity))
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=move(row.old_log_probs[order]),
        sample_index=move(row.sample_index[order]),
        advantages=move(row.advantages),
        fresh=move(row.weight_versions == weight_version),
        entropy=entropy,
        top_log_probs=top_log_probs,
        sampler_top_log_probs=move(row.top_log_probs[order]),
        ref_log_probs=None
        if reference is None
        else terms.of(_reference_scores(reference, row, at, request, backend))[0],
        router_loss=router_loss,
        forwarded=row.forwarded,
    )


@dataclass(frozen=True)
class _Terms:
    """From scores of positions to those of the M terms, over the support that each term's sampler had.

    Of the request's further tokens the first `top` are the sampler's top tokens, the rest `support` [M, W], -1 padded.
    """

    request: ScoreRequest
    support: torch.Tensor
    top: int

    def of(self, scores: Scores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities [M], top log-probabilities [M, K] and entropy [M]."""
        owner = self.request.owner
        log_probs, entropy = scores.log_probs[owner], scores.entropy[owner]
        top, support = scores.top_log_probs[:, : self.top], scores.top_log_probs[:, self.top :]
        if not support.shape[1]:
            return log_probs, top, entropy
        present = self.support >= 0
        log_probs, top, inside = over_support(log_probs, top, support, present)
        return log_probs, top, torch.where(present.any(1), inside, entropy)


@torch.no_grad()
def _reference_scores(reference: Any, row: PackedRow, at: torch.Tensor, request: ScoreRequest, backend: str) -> Scores:
    if isinstance(reference, PeftModel):
        with reference.disable_adapter():
            return score_row(reference, row.layout, at, request, backend)
    return score_row(reference, row.layout, at, request, backend)
