"""What is sent: names, completeness, and merged LoRA against peft's own forward pass."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_llama, tiny_qwen3
from trainer_core.sync.merged import check_mergeable, merged_weights
from trainer_core.sync.server_api import WeightSyncError
from trainer_core.sync.weights import full_weights, made, manifest, touched

TOKENS = torch.arange(5, 45).reshape(2, 20)


def with_lora(path, **settings):
    """A model with a random adapter, and an untouched copy of its base."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
            "init_lora_weights": False,
        }
        | settings
    )
    plain = copy.deepcopy(base).eval()
    model = get_peft_model(base, config).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model, plain


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 7}},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=str,
)
def test_merged_weights_compute_what_base_and_adapter_compute(settings):
    model, plain = with_lora(tiny_qwen3(), **settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    untouched = plain(TOKENS).logits
    check_mergeable(model)
    weights = merged_weights(model)
    tensors = {weight.name: weight.make() for weight in weights}
    assert all(tuple(tensors[weight.name].shape) == weight.shape for weight in weights)
    problems = plain.load_state_dict(tensors, strict=False)
    assert problems.unexpected_keys == []
    with torch.no_grad():
        expected = model(TOKENS).logits
        torch.testing.assert_close(plain(TOKENS).logits, expected, atol=1e-4, rtol=0)
    assert (untouched - expected).abs().max() > 0.1  # the adapter does something
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_merging_is_done_in_fp32_for_a_bf16_model():
    model, _ = with_lora(tiny_qwen3())
    reference = {
        weight.name: weight.make() for weight in merged_weights(copy.deepcopy(model).to(torch.bfloat16).float())
    }
    for weight in merged_weights(model.to(torch.bfloat16)):
        torch.testing.assert_close(weight.make().float(), reference[weight.name], atol=0, rtol=0)


def test_fused_matrices_are_sent_together():
    model, _ = with_lora(tiny_qwen3(), target_modules=["q_proj"], layers_to_transform=[1])
    names = [weight.name for weight in merged_weights(model)]
    assert {name.split(".")[2] for name in names} == {"1"}
    assert {"model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"} <= set(names)


@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}], ids=str
)
def test_an_adapted_head_that_is_also_the_embedding_is_refused(settings):
    model, _ = with_lora(tiny_llama(), **settings)
    with pytest.raises(WeightSyncError, match="one matrix for both"):
        check_mergeable(model)


def test_what_cannot_be_merged_is_refused_by_name():
    model, _ = with_lora(tiny_qwen3(), trainable_token_indices=[1, 2])
    with pytest.raises(WeightSyncError, match="trainable_token_indices"):
        check_mergeable(model)


def test_a_shared_matrix_is_sent_once_and_frozen_parts_are_not():
    model = AutoModelForCausalLM.from_pretrained(tiny_llama())
    names = [weight.name for weight in full_weights(model)]
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
    model.model.embed_tokens.requires_grad_(False)
    assert "model.embed_tokens.weight" not in [weight.name for weight in full_weights(model)]


def test_touched_keeps_order_and_whole_layers():
    names = ["embed.weight", "layers.0.q", "layers.0.k", "layers.1.q", "layers.10.q", "norm.weight"]
    assert touched(["layers.1.q", "norm.weight"], names) == ["layers.1.q", "norm.weight"]
    assert touched(["layers.0.k"], names) == ["layers.0.q", "layers.0.k"]


def test_what_is_announced_is_what_is_made():
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float32)
    weights = full_weights(model)
    announced = manifest(weights, torch.bfloat16)
    tensors = list(made(weights, torch.bfloat16, torch.device("cpu")))
    assert [list(tensor.shape) for tensor in tensors] == announced["shapes"]
    assert set(announced["dtype_names"]) == {"bfloat16"} == {str(tensor.dtype).split(".")[1] for tensor in tensors}
    assert all(tensor.is_contiguous() for tensor in tensors)
    cast_before = dict(model.to(torch.bfloat16).named_parameters())
    for name, tensor in zip(announced["names"], tensors, strict=True):
        assert torch.equal(tensor, cast_before[name])
