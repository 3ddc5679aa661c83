"""Checkpoints of a sharded model.

A folder holds what people use, written by rank 0 from parameters gathered one at a time (model.safetensors in the precision
the server serves, or the adapter), and what a resume needs, of which each rank writes its own shards: float32 weights in
`pytorch_model_fsdp_0`, the optimizer in `optimizer_0`. Shards can be read by another number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from trainer_core.distributed_fsdp import reshard
from trainer_core.sync.weights import full_tensor

SHARDS = "pytorch_model_fsdp_0"
PLAIN_OPTIMIZER = "optimizer.pt"


def has_shards(folder: Path) -> bool:
    return (folder / SHARDS).is_dir()


def check_resumable(folder: Path, sharded: bool) -> None:
    """Raises ValueError when a checkpoint of one process meets several ranks, or the other way round."""
    if has_shards(folder) and not sharded:
        raise ValueError(
            f"{folder} was written by several trainer ranks and this is one; resume it with two or more training GPUs, or "
            "fork the run, which takes its weights alone"
        )
    if sharded and (folder / PLAIN_OPTIMIZER).is_file():
        raise ValueError(
            f"{folder} was written by one trainer process and these are several ranks; resume it with one training GPU, or "
            "fork the run, which takes its weights alone"
        )


def gather_state(model: nn.Module, dtype: torch.dtype | None, keep: bool) -> dict[str, torch.Tensor]:
    """The whole state dict on the CPU, floating-point weights as `dtype` (None: as they are); an adapter's own part only.

    A collective of all ranks. Those that do not `keep` get an empty dict.
    """
    reshard(model)
    state: dict[str, torch.Tensor] = {}
    whole: dict[int, torch.Tensor] = {}
    for name, value in _saved(model):
        if id(value) not in whole:  # a matrix that is both embedding and output layer is gathered once
            full = full_tensor(value.detach())
            if keep:
                converted = full.to(dtype) if dtype is not None and full.is_floating_point() else full
                whole[id(value)] = converted.to("cpu")
            else:
                whole[id(value)] = torch.empty(0)
        if keep:
            state[name] = whole[id(value)]
    return state


def _saved(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, PeftModel):
        yield from ((name, value) for name, value in model.named_parameters() if value.requires_grad)
    else:
        yield from model.state_dict(keep_vars=True).items()


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Say in config.json how the weights were written: transformers loads them as that says."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
