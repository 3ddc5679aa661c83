"""One packed row through the model: from its arrays to the tensors of the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from peft import PeftModel

from trainer_core.loss import LossInputs
from trainer_core.model import ScoreRequest, score_row
from trainer_core.packing.collator import PackedRow


def loss_inputs(
    model: Any,
    row: PackedRow,
    *,
    device: torch.device,
    backend: str,
    temperature: float,
    weight_version: int,
    reference: Any = None,
) -> LossInputs:
    """Forward the row and gather what the loss needs of its M terms, in the order of their positions.

    Positions that several samples share are scored once. `weight_version` is the current one. `reference` is a model
    for the KL term; a PeftModel stands for its base model, with the adapter off.
    """
    positions, first, owner = np.unique(row.token_index, return_index=True, return_inverse=True)
    targets = row.target_ids[first]
    if not row.terms:  # filler: one position is scored, so that the row is part of the graph, and no term refers to it
        positions, targets = np.zeros(1, np.int64), np.zeros(1, np.int64)
    order = np.argsort(owner, kind="stable")

    def move(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    at = move(positions)
    request = ScoreRequest(move(targets), move(row.top_ids[order]), move(owner[order]), temperature)
    scores = score_row(model, row.layout, at, request, backend)
    ref_log_probs = None if reference is None else _reference_log_probs(reference, row, at, request, backend)
    return LossInputs(
        log_probs=scores.log_probs[request.owner],
        old_log_probs=move(row.old_log_probs[order]),
        sample_index=move(row.sample_index[order]),
        advantages=move(row.advantages),
        fresh=move(row.weight_versions == weight_version),
        entropy=scores.entropy[request.owner],
        top_log_probs=scores.top_log_probs,
        sampler_top_log_probs=move(row.top_log_probs[order]),
        ref_log_probs=None if ref_log_probs is None else ref_log_probs[request.owner],
    )


@torch.no_grad()
def _reference_log_probs(
    reference: Any, row: PackedRow, at: torch.Tensor, request: ScoreRequest, backend: str
) -> torch.Tensor:
    if isinstance(reference, PeftModel):
        with reference.disable_adapter():
            return score_row(reference, row.layout, at, request, backend).log_probs
    return score_row(reference, row.layout, at, request, backend).log_probs
