"""Putting received weights in place by plain copies, once it is known which.

vLLM's loaders cut and join the tensors of a checkpoint (query, key and value become one matrix) in Python, tensor by tensor,
which takes tens of milliseconds in which nothing is generated. What they do is the same at each push, so it is written down
at one push, and is one batch of copies at all later ones. That holds only where a weight is served as the loader left it,
so it is checked, not believed: `learn` compares what it would copy with what vLLM's own way has just put in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NotLearnable(Exception):
    """Why weights of this model must go through vLLM's loaders each time."""


@dataclass(frozen=True)
class Copies:
    """`sources` are views of the received tensors, `targets` views of the model's own."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]

    @torch.no_grad()
    def apply(self) -> None:
        """Make them, in the order of the current stream."""
        torch._foreach_copy_(self.targets, self.sources, non_blocking=True)


@torch.no_grad()
def learn(model: Any, received: Mapping[str, torch.Tensor]) -> Copies:
    """The copies by which the received tensors, already in place, get into the model. Changes nothing.

    Raises NotLearnable when the model does not hold just what the loaders would copy.
    """
    recorder = _Recorder(model, received)
    try:
        with recorder:
            model.load_weights(iter(received.items()))
    except NotLearnable:
        raise
    except Exception as error:  # a loader met a parameter that is no longer as it was when the model was loaded
        raise NotLearnable(f"its loaders end with {type(error).__name__}: {error}") from error
    recorder.check()
    return Copies(recorder.targets, recorder.sources)


class _Recorder(TorchDispatchMode):
    """Notes copies from the received tensors to the model's in place of making them."""

    FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

    def __init__(self, model: Any, received: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self._own: dict[int, tuple[str, int]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.numel() and self._own.setdefault(_place(tensor), (name, tensor.numel()))[0] != name:
                raise NotLearnable(f"{name} shares its memory")
        self._received = {_place(tensor): name for name, tensor in received.items()}
        self._covered: dict[int, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and func._schema.arguments and _writes_first(func) else None
        place = None if not isinstance(target, torch.Tensor) else _place(target)
        if place not in self._own:
            return func(*args, **kwargs)
        assert target is not None
        name, _ = self._own[place]
        if func in self.FILLS:  # padding, which stays as it is
            self._covered[place] += target.numel()
            return target
        if func is not torch.ops.aten.copy_.default:
            raise NotLearnable(f"{name} is changed by {func}")
        source = args[1]
        if _place(source) not in self._received or source.shape != target.shape or source.dtype != target.dtype:
            raise NotLearnable(f"{name} is not a plain copy of what was received")
        self._covered[place] += target.numel()
        self.targets.append(target)
        self.sources.append(source)
        return target

    def check(self) -> None:
        """That each received tensor is used, that a tensor of the model is filled wholly or not at all, and by equal values."""
        used = {_place(source) for source in self.sources}
        if unused := [name for place, name in self._received.items() if place not in used]:
            raise NotLearnable(f"{unused[0]} goes nowhere")
        for place, covered in self._covered.items():
            name, size = self._own[place]
            if covered < size:
                raise NotLearnable(f"{name} is filled only in part")
        for target, source in zip(self.targets, self.sources, strict=True):
            if not torch.equal(target, source.to(target.device)):
                raise NotLearnable(f"{self._own[_place(target)][0]} is served in another form than it is loaded in")


def _place(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common."""
    return tensor.untyped_storage().data_ptr()


def _writes_first(func: Any) -> bool:
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write
