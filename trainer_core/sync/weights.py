"""Which tensors a push sends: named and shaped as in the checkpoint the server loaded, made one at a time.

transformers may hold weights otherwise than their checkpoint does: the matrices of all experts of a layer as one, a text tower
under another prefix. It keeps what it did while loading, and undoes that when it saves; here it is undone for one weight at a
time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True)
class ServedWeight:
    """One tensor of a push. `make` gives the full tensor, still in the trainer's dtype and on its device."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor (a collective of all ranks), or the tensor itself."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def full_weights(model: nn.Module) -> list[ServedWeight]:
    """Weights of a fully trained model: parameters that train, and their neighbours in the same decoder layer.

    A matrix that is both embedding and output head is one parameter and is sent once, under its first name.
    Frozen parts (a vision tower) stay as the server loaded them.
    """
    parameters = dict(model.named_parameters())
    wanted = touched([name for name, parameter in parameters.items() if parameter.requires_grad], parameters)
    return as_in_checkpoint(model, [_plain(name, parameters[name]) for name in wanted])


def as_in_checkpoint(model: nn.Module, weights: Iterable[ServedWeight]) -> list[ServedWeight]:
    """The same weights as the model's checkpoint has them, those of one weight of the model next to each other.

    `model` is the plain model, without an adapter around it. A weight that is several in the checkpoint is made once for all
    of them, when the first is asked for.
    """
    return [part for weight in weights for part in _parts(model, weight)]


def _parts(model: Any, weight: ServedWeight) -> list[ServedWeight]:
    like = torch.empty(weight.shape, device="meta")
    shapes = revert_weight_conversion(model, {weight.name: like})
    ((name, only),) = shapes.items() if len(shapes) == 1 else [("", None)]
    if only is like:  # but for its name it is as in the checkpoint, as nearly all are: nothing to do while servers wait
        return [ServedWeight(name, weight.shape, weight.make)]
    parts = MadeTogether(lambda: revert_weight_conversion(model, {weight.name: weight.make()}))
    return [ServedWeight(name, tuple(value.shape), partial(parts.take, name)) for name, value in shapes.items()]


class MadeTogether:
    """Tensors that come out of one call, by name: it is made for the first that is asked for, and kept for the others."""

    def __init__(self, make: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._make = make
        self._waiting: dict[str, torch.Tensor] = {}

    def take(self, name: str) -> torch.Tensor:
        if name not in self._waiting:
            self._waiting = self._make()
        return self._waiting.pop(name)


def touched(changed: Iterable[str], names: Iterable[str]) -> list[str]:
    """All names that belong to a decoder layer of one of `changed`, and `changed` itself, in the order of `names`.

    The server fuses matrices of a layer (query, key and value; gate and up), and fused ones must be loaded together.
    """
    changed = set(changed)
    layers = {layer for name in changed if (layer := _layer_of(name))}
    return [name for name in names if name in changed or _layer_of(name) in layers]


def _layer_of(name: str) -> str | None:
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else None


def _plain(name: str, parameter: torch.Tensor) -> ServedWeight:
    return ServedWeight(name, tuple(parameter.shape), lambda: full_tensor(parameter.detach()))


def manifest(weights: list[ServedWeight], dtype: torch.dtype) -> dict[str, list]:
    """What the server is told it will receive, in this order."""
    return {
        "names": [weight.name for weight in weights],
        "dtype_names": [str(dtype).removeprefix("torch.")] * len(weights),
        "shapes": [list(weight.shape) for weight in weights],
    }


def made(weights: list[ServedWeight], dtype: torch.dtype, device: torch.device | None) -> Iterator[torch.Tensor]:
    """The tensors themselves, contiguous, in the server's dtype, on `device` (None: where they are), one at a time."""
    for weight in weights:
        tensor = weight.make()
        yield tensor.to(dtype=dtype, device=device or tensor.device).contiguous()
