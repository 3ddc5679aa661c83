"""FSDP2 through accelerate: where the trainer needs it set otherwise than by default."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

if TYPE_CHECKING:
    from accelerate import Accelerator

    from trainer_core.config import AsyncGRPOConfig


def wanted(args: AsyncGRPOConfig) -> bool:
    """Whether the training arguments or accelerate's launcher ask for FSDP."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def plugin(args: AsyncGRPOConfig, given: FullyShardedDataParallelPlugin | None) -> FullyShardedDataParallelPlugin:
    """The settings of the launcher or of `given`, with these of ours.

    - Precision: computed in 16 bits where args say so, with gradients reduced in float32. Outputs keep their precision;
      accelerate's own policy would round log-probabilities to 16 bits.
    - Checkpoints: each rank writes its own shards (trainer_core.distributed_checkpoint).

    Raises NotImplementedError for FSDP1.
    """
    made = given or FullyShardedDataParallelPlugin()
    if made.fsdp_version != 2:
        raise NotImplementedError(f"FSDP version {made.fsdp_version} is not supported; set fsdp_version to 2")
    if made.cpu_ram_efficient_loading:
        raise NotImplementedError(
            "fsdp_cpu_ram_efficient_loading is not supported; every rank reads the model (leave it false)"
        )
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    made.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=None if half is None else torch.float32
    )
    made.set_state_dict_type("SHARDED_STATE_DICT")
    return made


def enable_on_cpu(accelerator: Accelerator, made: FullyShardedDataParallelPlugin) -> None:
    """accelerate turns FSDP on for GPUs only; torch's works over gloo as well, which is how it is tested without any."""
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = made


def shard_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model that isn't trained, in place."""
    return fsdp2_prepare_model(accelerator, model)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Give up full parameters that a forward pass without a backward pass left behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
