"""Tiny models of every supported family, with random weights that are large enough for attention to matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from trainer_core.attention.interface import IMPLEMENTATION
from trainer_core.scoring import install_scoring

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    # smaller weights: the delta rule of transformers loses digits in float32 where keys are long
    **SIZES, **HEAD, "initializer_range": 0.05, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
GEMMA = {**SIZES, **HEAD, "query_pre_attn_scalar": 8, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
          "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
          "patch_size": 4}  # fmt: skip
VL = {**SIZES, **HEAD, **ROPE}
WINDOW = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}

MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEAD)),
    "qwen3, window in one layer": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEAD, **WINDOW)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEAD, **EXPERTS)),
    "smollm3, one layer without positions": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layers=[1, 0])),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**DELTA, **EXPERTS, shared_expert_intermediate_size=24, partial_rotary_factor=0.5)
    ),
    "qwen3_5_text": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DELTA, **ROPE)),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**DELTA, **ROPE, **EXPERTS, shared_expert_intermediate_size=24)
    ),
    "qwen3_vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=VL, vision_config={**VISION, "deepstack_visual_indexes": [0]})
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config={**VL, **EXPERTS}, vision_config={**VISION, "deepstack_visual_indexes": [0]})
    ),
    "qwen3_5": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config={**DELTA, **ROPE}, vision_config=VISION)
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(
            text_config={**DELTA, **ROPE, **EXPERTS, "shared_expert_intermediate_size": 24}, vision_config=VISION
        )
    ),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=GEMMA, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=39)
    ),
}  # fmt: skip
FAMILIES = tuple(MAKERS)
WITH_EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_vl_moe", "qwen3_5_moe")
WITH_VISION = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3")


def make(family: str) -> Any:
    torch.manual_seed(0)
    model = MAKERS[family]().float().eval()
    if family.startswith("gemma"):  # norms scale by 1 + weight, so that weights are small at the start
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    install_scoring(model)
    return model


@cache
def tiny(family: str) -> Any:
    """One model for all tests that leave it as it is."""
    return make(family)


def set_implementation(model: Any, packed: bool) -> None:
    model.set_attn_implementation(IMPLEMENTATION if packed else "eager")
