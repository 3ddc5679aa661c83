"""Learns the copies of a real vLLM model and says whether they do what its loaders do.

usage: python -m tests.trainer_core.sync.copies_program CHECKPOINT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.network_utils import get_open_port

from trainer_core.sync.vllm_copies import learn


def main(folder: Path) -> None:
    weights = {
        name: weight.float() for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()
    }
    with vllm(folder) as config:
        model, loaded = (built(config) for _ in range(2))
    model.load_weights(iter(weights.items()))
    copies = learn(model, weights)
    for weight in weights.values():  # the next push arrives in the same memory
        weight.copy_(torch.randn_like(weight))
    copies.apply()
    loaded.load_weights(iter(weights.items()))
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        if not torch.equal(one, other):
            sys.exit(f"{name} differs")
    print(f"{type(model).__name__}: {len(copies.targets)} copies of {len(weights)} weights")


@contextmanager
def vllm(folder: Path) -> Iterator[VllmConfig]:
    """What vLLM needs around a model that is built without a server."""
    arguments = EngineArgs(
        model=str(folder), dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield config


def built(config: VllmConfig) -> Any:
    config.compilation_config.static_forward_context.clear()  # layers have names, and a second model the same ones
    return initialize_model(vllm_config=config, model_config=config.model_config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
