"""Gathering the shards of a model for a push: a collective, in one fixed order, on all trainer ranks.

Rank 0 calls the others (`take_part`) when it is ready to send, gathers on its main thread and hands the whole tensors to the
thread that sends them. When a server fails in the middle it gathers to the end all the same, so that the ranks stay in step.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn

from trainer_core.sync.merged import merged_weights
from trainer_core.sync.server_api import WeightSyncError
from trainer_core.sync.weights import ServedWeight, full_tensor, full_weights, made

AHEAD = 4
"""Whole tensors that may wait to be sent."""
POLL_S = 0.05

Kind = Literal["full", "merged", "adapter"]
Summon = Callable[[Kind], None]
"""Calls the other ranks to gather weights of that kind. None where nothing is sharded."""


def adapter_weights(model: Any) -> list[ServedWeight]:
    """What trains beside a frozen base model, by the names of the model's own state dict."""
    if not isinstance(model, PeftModel):
        raise WeightSyncError(f"an adapter push needs a PeftModel, found {type(model).__name__}")
    return [
        ServedWeight(name, tuple(value.shape), lambda value=value: full_tensor(value.detach()))  # type: ignore[misc]
        for name, value in model.named_parameters()
        if value.requires_grad
    ]


WEIGHTS: dict[Kind, Callable[[Any], list[ServedWeight]]] = {
    "full": full_weights,
    "merged": merged_weights,
    "adapter": adapter_weights,
}


def take_part(model: nn.Module, kind: Kind) -> None:
    """What a rank other than 0 does when it is called to gather."""
    for weight in WEIGHTS[kind](model):
        weight.make()


def gathered(model: nn.Module, kind: Kind, summon: Summon | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors, on rank 0, one at a time."""
    if summon is not None:
        summon(kind)
    for weight in WEIGHTS[kind](model):
        yield weight.name, weight.make()


@dataclass(frozen=True)
class _Whole:
    """A gathered tensor, and what a GPU must have done before it may be read."""

    tensor: torch.Tensor
    ready: Any


class Relay:
    """Tensors on their way from the thread that gathers them to the one that sends them, in the server's dtype."""

    def __init__(
        self, weights: list[ServedWeight], dtype: torch.dtype, device: torch.device | None, summon: Callable[[], None]
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._summon = summon
        self._queue: queue.Queue[_Whole] = queue.Queue(AHEAD)
        self._given_up = False

    def gather(self, given_up: Callable[[], bool]) -> None:
        """Gather all weights on this thread. Once `given_up` says so, what is gathered is thrown away."""
        self._summon()
        for tensor in made(self._weights, self._dtype, self._device):
            ready = torch.cuda.Event() if tensor.is_cuda else None
            if ready is not None:
                ready.record()
            self._put(_Whole(tensor, ready), given_up)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The tensors, for the sending thread."""
        for _ in self._weights:
            yield self._take()

    def _put(self, whole: _Whole, given_up: Callable[[], bool]) -> None:
        while not self._given_up:
            try:
                self._queue.put(whole, timeout=POLL_S)
                return
            except queue.Full:
                self._given_up = given_up()

    def _take(self) -> torch.Tensor:
        while not self._given_up:
            try:
                whole = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if whole.ready is not None:  # the sender may work on a stream of its own
                stream = torch.cuda.current_stream()
                stream.wait_event(whole.ready)
                whole.tensor.record_stream(stream)
            return whole.tensor
        raise WeightSyncError("the push was given up")
