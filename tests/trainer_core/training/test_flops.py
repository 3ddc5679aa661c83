"""FLOPs against torch's own counter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer_core.attention.models import make as make_model
from trainer_core.flops import FlopCounter, peak_flops


def tiny(tie: bool = False) -> Any:
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tie, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def counted(model: Any, tokens: int) -> int:
    """Forward and backward, eager attention: the whole square of pairs is computed, whatever the mask."""
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(200, (1, tokens))).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tokens", [16, 100])
def test_full_training(tokens: int) -> None:
    model = tiny()
    assert FlopCounter.of(model).total(tokens, tokens * tokens, tokens) == counted(model, tokens)


def test_forward_only() -> None:
    model = tiny()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(200, (1, 50)), logits_to_keep=7)
    assert FlopCounter.of(model).forward(50, 2500, 7) == counter.get_total_flops()


def test_lora_skips_the_gradients_of_frozen_weights() -> None:
    """The count is exact up to the first layer's inputs, which need no gradient."""
    model = get_peft_model(tiny(), LoraConfig(r=4, target_modules="all-linear"))
    tokens = 64
    expected, mine = counted(model, tokens), FlopCounter.of(model).total(tokens, tokens * tokens, tokens)
    layer = model.get_base_model().model.layers[0].self_attn
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    frozen = sum(p.base_layer.weight.numel() + p.lora_A["default"].weight.numel() for p in projections)
    assert mine == expected + 2 * frozen * tokens


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl", "gemma3_text"])
def test_other_families(family: str) -> None:
    """Experts count as far as a token uses them, a vision tower does not; eager attention computes the whole square."""
    model = make_model(family)
    model.set_attn_implementation("eager")
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")  # a loop of plain products, which the counter knows
    tokens = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(3, 30, (1, tokens)), use_cache=False)
    assert counter.get_total_flops() == FlopCounter.of(model).forward(tokens, tokens * tokens, tokens)


def test_windows_hide_pairs() -> None:
    counter = FlopCounter.of(make_model("gemma3_text"))  # one layer sees 5 tokens, the other all
    assert counter.windows == (5, None)
    assert counter.pairs(np.arange(8)) == (36 + 1 + 2 + 3 + 4 + 5 * 4) / 2
    assert FlopCounter.of(make_model("mistral, window")).windows == (5, 5)
    assert FlopCounter.of(make_model("qwen3, window in one layer")).windows == (None, 5)


def test_a_delta_layer_costs_its_state_and_has_no_pairs() -> None:
    model = make_model("qwen3_5_text")
    counter = FlopCounter.of(model)
    assert counter.windows == (None,)
    matrices = sum(
        p.numel() for name, p in model.model.named_parameters() if p.dim() > 1 and "embed_tokens" not in name
    )
    assert counter.token_forward == 2 * matrices + 2 * 3 * 2 * (4 * 8 * 8)


def test_pair_cost_is_relative_to_a_token() -> None:
    counter = FlopCounter.of(tiny())
    linear = 2 * 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    assert counter.pair_cost == pytest.approx(4 * 64 * 3 / linear)


def test_no_peak_on_a_cpu() -> None:
    assert peak_flops(torch.device("cpu"), autocast=True) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_by_device_name(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), autocast=True) == peak
    assert peak_flops(torch.device("cuda"), autocast=False) is None
