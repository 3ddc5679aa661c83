"""Which models a packed row is right for, and which part of them is trained.

A packed row is right for a model when every layer that mixes tokens follows the tree: attention by `tree_attention_forward`,
Gated DeltaNet by `trainer_core.attention.delta`. Models are named one by one, because each was compared with its own
forward pass of single sequences (tests/trainer_core/attention).
"""

from __future__ import annotations

from typing import Any

from peft import PeftConfig
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

# model_type of the config: the name that people know it by.
SUPPORTED = {
    "llama": "Llama (SmolLM2)",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "smollm3": "SmolLM3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    # Of these the text tower is trained.
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "gemma3": "Gemma 3",
}
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
DELTA_MODELS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
# Rotary embeddings whose frequencies depend on the longest sequence of the batch.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_model(config: PretrainedConfig) -> None:
    """Refuse a model that a packed row would compute wrongly.

    Raises NotImplementedError with one sentence that names the model type, what is not supported and what is.
    """
    kind = config.model_type
    if kind not in SUPPORTED:
        names = ", ".join(dict.fromkeys(SUPPORTED.values()))
        raise NotImplementedError(f"model type {kind!r} is not supported; supported are {names}")
    text: Any = config.get_text_config()
    known = ATTENTION_LAYERS | ({"linear_attention"} if text.model_type in DELTA_MODELS else set())
    if other := sorted(set(getattr(text, "layer_types", None) or []) - known):
        raise NotImplementedError(
            f"model type {kind!r} has layers of kind {', '.join(other)}, which would mix tokens along the row without regard "
            f"to the tree; supported kinds are {', '.join(sorted(known))}"
        )
    if getattr(text, "use_bidirectional_attention", None):
        raise NotImplementedError(
            f"model type {kind!r} sets use_bidirectional_attention; only attention to earlier tokens is supported"
        )
    for rope in _rope_types(getattr(text, "rope_parameters", None)):
        if rope in LENGTH_DEPENDENT_ROPE:
            raise NotImplementedError(
                f"model type {kind!r} has rotary embeddings of type {rope!r}, which depend on the longest sequence of a "
                "batch; supported are those that depend on a token's position alone, such as default, linear, llama3 and yarn"
            )


def _rope_types(parameters: Any) -> list[str]:
    """Types in `rope_parameters`, which holds one set, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(one.get("rope_type", "default")) for one in nested or [parameters]]


def has_vision(config: PretrainedConfig) -> bool:
    """Whether the model sees images, so that only its text tower is trained."""
    return getattr(config, "vision_config", None) is not None


def model_class(config: PretrainedConfig) -> Any:
    """The auto class under which a model's weights have the names of its checkpoint, vision included."""
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def freeze_all_but_text(model: PreTrainedModel) -> None:
    """Leave gradients only to the text tower and the output layer of a model that sees images."""
    if not has_vision(model.config):
        return
    parts: Any = (model.get_decoder(), model.get_output_embeddings())
    trained = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def adapt_text_only(settings: PeftConfig, model: PreTrainedModel) -> PeftConfig:
    """The LoRA settings with everything outside the text tower excluded; an exclusion of the user's own is kept."""
    config: Any = settings
    if has_vision(model.config) and config.exclude_modules is None:
        tower = next(name for name, module in model.named_modules() if module is model.get_decoder())
        config.exclude_modules = rf"(?!{tower.replace('.', '[.]')}[.]).*"
    return settings


def router_loss(config: PretrainedConfig, coefficient: float | None) -> tuple[float, int]:
    """Coefficient of the load-balancing loss and experts per token; both 0 where there is no such loss.

    None stands for the model's own coefficient.
    """
    text: Any = config.get_text_config()
    if coefficient is None:
        coefficient = float(getattr(text, "router_aux_loss_coef", 0.0))
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    return (coefficient, text.num_experts_per_tok) if experts and coefficient > 0 else (0.0, 0)
