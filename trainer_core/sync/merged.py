"""LoRA pushed as full weights: base and adapter are merged on the way out, one layer at a time.

For servers without --enable-lora, and for what vLLM's adapters cannot express (DoRA, trained biases, modules_to_save).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from trainer_core.sync.server_api import WeightSyncError
from trainer_core.sync.weights import MadeTogether, ServedWeight, as_in_checkpoint, full_tensor, touched

# Settings of LoraConfig under which base + adapter is not a plain set of weights of the base architecture.
UNMERGEABLE = (
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
    "arrow_config",
    "monteclora_config",
)


def lora_config(model: PeftModel) -> LoraConfig:
    """Configuration of the active adapter. Raises WeightSyncError when it is not one LoRA adapter."""
    config = model.active_peft_config
    if not isinstance(config, LoraConfig) or len(model.active_adapters) != 1:
        kinds = ", ".join(f"{name} ({type(model.peft_config[name]).__name__})" for name in model.active_adapters)
        raise WeightSyncError(f"the weight push knows one active LoRA adapter, but the active ones are {kinds}")
    return config


def check_mergeable(model: PeftModel) -> None:
    """Raises WeightSyncError, naming the setting, when the adapter cannot be merged into weights the server knows."""
    config = lora_config(model)
    if found := [name for name in UNMERGEABLE if getattr(config, name, None)]:
        raise WeightSyncError(
            f"LoRA with {', '.join(found)} cannot be merged into weights that vLLM knows; leave it out"
        )
    base: Any = model.get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if base.config.tie_word_embeddings and any(_trains(module) for module in (head, embedding)):
        raise WeightSyncError(
            "the adapter trains the embedding or the output head of a model that has one matrix for both, which the "
            "server cannot hold apart; leave embed_tokens and lm_head out of target_modules and modules_to_save"
        )


def _trains(module: nn.Module | None) -> bool:
    return module is not None and any(parameter.requires_grad for parameter in module.parameters())


def merged_weights(model: PeftModel) -> list[ServedWeight]:
    """Weights of the base's checkpoint with the active adapter in them; layers that no adapter touches are left out.

    Merging is done in float32, on copies: the trained parameters stay as they are.
    """
    base = model.get_base_model()
    adapter = model.active_adapters[0]
    weights: dict[str, ServedWeight] = {}
    changed: set[str] = set()
    inside: list[str] = []
    for path, module in base.named_modules():
        if any(path.startswith(prefix) for prefix in inside):
            continue
        if isinstance(module, LoraLayer):
            inside.append(f"{path}.")
            found = _merged_layer(path, module)
            if adapter in module.lora_A or adapter in module.lora_embedding_A or _trains(module.get_base_layer()):
                changed |= found.keys()
        elif isinstance(module, ModulesToSaveWrapper):
            inside.append(f"{path}.")
            found = _plain(path, module.modules_to_save[adapter])
            changed |= found.keys()
        else:
            own = dict(module.named_parameters(recurse=False))
            found = {f"{path}.{name}": _weight(f"{path}.{name}", parameter) for name, parameter in own.items()}
            changed |= {f"{path}.{name}" for name, parameter in own.items() if parameter.requires_grad}
        weights.update(found)
    return as_in_checkpoint(base, [weights[name] for name in touched(changed, weights)])


def _weight(name: str, parameter: torch.Tensor) -> ServedWeight:
    return ServedWeight(name, tuple(parameter.shape), lambda: full_tensor(parameter.detach()))


def _plain(path: str, module: nn.Module) -> dict[str, ServedWeight]:
    return {f"{path}.{name}": _weight(f"{path}.{name}", value) for name, value in module.named_parameters()}


def _merged_layer(path: str, layer: Any) -> dict[str, ServedWeight]:
    merged = MadeTogether(lambda: _merge(layer))
    base = dict(layer.get_base_layer().named_parameters(recurse=False))
    return {
        f"{path}.{name}": ServedWeight(f"{path}.{name}", tuple(value.shape), partial(merged.take, name))
        for name, value in base.items()
    }


@torch.no_grad()
def _merge(layer: Any) -> dict[str, torch.Tensor]:
    """Parameters of the layer's base with the adapter merged by peft itself, on a float32 copy of the layer."""
    copies = {id(value): nn.Parameter(full_tensor(value.detach()).float().clone()) for value in layer.parameters()}
    inner = copy.deepcopy(layer, copies)
    while isinstance(inner, LoraLayer):  # around the experts of a layer, one for each of their parameters
        inner.merge()
        inner = inner.base_layer
    return {name: value.detach() for name, value in inner.named_parameters(recurse=False)}
