"""Tiny checkpoints of every supported family, as a vLLM server loads them: random weights, one token per byte.

Sizes are about the smallest that vLLM's CPU kernels take: heads of 32 in attention, of 128 in Gated DeltaNet. Folders are
cached as those of tests.tiny_model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
    PreTrainedModel,
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

from tests.tiny_model import VOCAB_SIZE, model_folder

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256,
}  # fmt: skip
TIED = {**SIZES, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 32}
DELTA = {
    **SIZES, "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
GEMMA = {**TIED, "query_pre_attn_scalar": 32, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}}
HYBRID_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
                                   "partial_rotary_factor": 0.25, "mrope_interleaved": True}}  # fmt: skip
VL_ROPE = {"rope_parameters": {**ROPE["rope_parameters"], "mrope_interleaved": True}}
IMAGES = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
          "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
DEEP = {**VISION, "deepstack_visual_indexes": [0]}
SIGLIP = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
          "patch_size": 4}  # fmt: skip

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TIED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**TIED, "head_dim": 32, "hidden_size": 128})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "smollm3": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**{**TIED, "head_dim": 32, "hidden_size": 128}, no_rope_layers=[1, 0])
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=GEMMA, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=300, boi_token_index=302,
            eoi_token_index=303,
        )
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
    "qwen3_vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config={**TIED, **VL_ROPE}, vision_config=DEEP, tie_word_embeddings=True, **IMAGES)
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config={**SIZES, **VL_ROPE, **EXPERTS}, vision_config=DEEP, **IMAGES)
    ),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**DELTA, **EXPERTS, **SHARED, partial_rotary_factor=0.25)
    ),
    "qwen3_5_text": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DELTA, **HYBRID_ROPE)),
    "qwen3_5": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config={**DELTA, **HYBRID_ROPE}, vision_config=VISION, **IMAGES)
    ),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**DELTA, **HYBRID_ROPE, **EXPERTS, **SHARED)
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config={**DELTA, **HYBRID_ROPE, **EXPERTS, **SHARED}, vision_config=VISION, **IMAGES)
    ),
}  # fmt: skip
"""By model_type of the config."""


def build(family: str) -> PreTrainedModel:
    """A model of this family with weights large enough for every part to matter."""
    model = MAKERS[family]()
    with torch.no_grad():  # norms, biases and gates begin at constants, which would hide a mix-up
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_family(family: str, seed: int = 0) -> Path:
    """Folder of a tiny model of this family (a key of MAKERS), fp32, with tokenizer and chat template."""
    # Published Qwen3.5 checkpoints have the experts of a layer as one tensor, which transformers would save one by one.
    one_by_one = not family.startswith("qwen3_5_moe")
    return model_folder(
        f"tiny-{family}", lambda _: build(family), seed, Path(__file__), save_original_format=one_by_one
    )
