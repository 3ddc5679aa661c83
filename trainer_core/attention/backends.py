"""The attention backends, and the choice among them.

One that cannot be had (its package is not installed, the hub cannot be reached, its first try fails) is passed over; SDPA
is always there.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from trainer_core.attention.flex import flex_tree_attention
from trainer_core.attention.kernels import (
    FlashAttention3,
    FlashAttention4,
    Kernel,
    TorchVarlen,
    load_hub_kernel,
)
from trainer_core.attention.merged import flash_tree_attention
from trainer_core.attention.probe import Attend, flaw
from trainer_core.attention.sdpa import sdpa_tree_attention

logger = logging.getLogger(__name__)

# Kernels that work on parts of a tree and are merged; they compute in 16 bits.
KERNELS: dict[str, Callable[[], Kernel]] = {
    "fa3-hub": lambda: FlashAttention3(load_hub_kernel("kernels-community/flash-attn3", "flash_attn_interface")),
    "fa4-hub": lambda: FlashAttention4(load_hub_kernel("kernels-community/flash-attn4", "interface")),
    "fa4": lambda: FlashAttention4(importlib.import_module("flash_attn.cute.interface")),
    "varlen": TorchVarlen,
}
WHOLE: dict[str, Attend] = {"flex": flex_tree_attention, "sdpa": sdpa_tree_attention}
BACKENDS = (*KERNELS, *WHOLE)
SOFTCAP = {"fa3-hub", "fa4-hub", "fa4", *WHOLE}
TRIED_FIRST = {"fa3-hub", "fa4-hub"}
"""Kernels in whatever build the hub has today; the others are pinned, and tests on GPUs compare them."""


@dataclass(frozen=True)
class Hardware:
    """What the choice depends on. `capability` is CUDA's (major, minor), None elsewhere."""

    kind: str
    name: str
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: torch.device) -> Hardware:
        if device.type != "cuda":
            return cls(device.type, device.type)
        capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
        return cls("rocm" if torch.version.hip else "cuda", torch.cuda.get_device_name(device), capability)


def preferences(hardware: Hardware, dtype: torch.dtype) -> tuple[str, ...]:
    """Backends that can run there in this precision, best first: what was measured before what the hub has today."""
    half = dtype in (torch.float16, torch.bfloat16)
    if hardware.kind == "cuda" and hardware.capability is not None and half:
        major = hardware.capability[0]
        if major == 9:
            return ("fa4", "fa3-hub", "varlen", "flex", "sdpa")
        if major >= 10:
            return ("fa4", "fa4-hub", "varlen", "flex", "sdpa")
        if major == 8:
            return ("varlen", "flex", "sdpa")
    if hardware.kind == "rocm" and half:
        return ("varlen", "flex", "sdpa")
    return ("sdpa", "flex")


def choose_backend(
    device: torch.device, dtype: torch.dtype = torch.float32, softcap: bool = False, override: str | None = None
) -> str:
    """Name of the backend for a device and the precision that attention computes in.

    Raises ValueError when `override` names none or cannot be had, NotImplementedError when it lacks what the model needs.
    """
    hardware = Hardware.of(device)
    able = preferences(hardware, dtype)
    if override is None:
        return next(
            name for name in able if (name in SOFTCAP or not softcap) and not _missing(name, device, dtype, softcap)
        )
    if override not in BACKENDS:
        raise ValueError(f"attention backend {override!r} does not exist; there are {', '.join(BACKENDS)}")
    if softcap and override not in SOFTCAP:
        raise NotImplementedError(
            f"attention backend {override!r} on {hardware.name} has no softcap; allowed for this model are "
            f"{', '.join(name for name in able if name in SOFTCAP)}"
        )
    if override in KERNELS and dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"attention backend {override!r} computes in 16 bits, not {dtype}; use {' or '.join(WHOLE)}")
    if override in KERNELS and hardware.kind not in ("cuda", "rocm"):
        raise ValueError(f"attention backend {override!r} needs a GPU; on {hardware.name} use {' or '.join(WHOLE)}")
    attend(override)
    return override


@cache
def attend(name: str) -> Attend:
    """The function behind a backend's name. Raises ValueError where its kernel cannot be loaded."""
    if name in WHOLE:
        return WHOLE[name]
    try:
        return partial(flash_tree_attention, KERNELS[name]())
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"attention backend {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


@cache
def _missing(name: str, device: torch.device, dtype: torch.dtype, softcap: bool) -> str:
    """Why a backend can't be chosen; empty when it can. One that is there but doesn't work is worth a line in the log."""
    try:
        found = attend(name)
    except ValueError as error:
        return str(error)
    reason = flaw(found, device, dtype, softcap) if name in TRIED_FIRST else ""
    if reason:
        logger.warning("attention backend %s is passed over: %s", name, reason)
    return reason
