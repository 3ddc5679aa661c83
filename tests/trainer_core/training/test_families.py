"""What is trained of a model, and the load-balancing loss of one with experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.trainer_core.attention.models import WITH_EXPERTS, WITH_VISION, make, set_implementation, tiny
from tests.trainer_core.training.replay import make_group
from tests.trainer_core.training.test_loss import SETTINGS
from trainer_core.families import adapt_text_only, router_loss
from trainer_core.loss import LossInputs, LossSettings, StepTotals, policy_loss
from trainer_core.model import load_policy
from trainer_core.packing.collator import collate
from trainer_core.packing.planner import PackItem, plan_fixed
from trainer_core.row_loss import loss_inputs


@pytest.mark.parametrize("family", WITH_VISION)
def test_of_a_model_that_sees_only_the_text_tower_is_trained(family: str, tmp_path: Path) -> None:
    made = make(family)
    made.save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), dtype="float32", trust_remote_code=False, init_kwargs=None)
    assert type(model) is type(made)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, _ in model.named_parameters()} - trained
    assert trained
    assert all(re.match(r"model\.language_model\.|lm_head\.", name) for name in trained)
    assert frozen
    assert not any("language_model" in name or "lm_head" in name for name in frozen)
    adapted = get_peft_model(
        model, adapt_text_only(LoraConfig(r=2, target_modules=["q_proj", "qkv", "fc1", "out_proj"]), model)
    )
    adapters = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert adapters
    assert all("language_model" in name for name in adapters)


def groups(vocabulary: int = 40) -> list[PackItem]:
    samples = [sample for row in range(3) for sample in make_group(row)]
    for sample in samples:
        sample.input_ids = sample.input_ids % vocabulary
    return [item for sample in samples if (item := PackItem.of(sample)) is not None]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_packed_rows_load_balancing_loss_is_that_of_its_samples_in_a_padded_batch(family: str) -> None:
    model = tiny(family)
    items = groups()
    _, top_k = router_loss(model.config, 0.1)
    grads: list[torch.Tensor] = []
    gate = next(parameter for name, parameter in model.named_parameters() if name.endswith("mlp.gate.weight"))

    set_implementation(model, packed=False)
    width = max(item.nodes for item in items)
    tokens, mask = torch.zeros(len(items), width, dtype=torch.long), torch.zeros(len(items), width)
    for number, item in enumerate(items):
        tokens[number, : item.nodes] = torch.from_numpy(item.tokens[:-1].astype(np.int64))
        mask[number, : item.nodes] = 1
    output = model(input_ids=tokens, attention_mask=mask.long(), output_router_logits=True, use_cache=False)
    experts = model.config.get_text_config().num_experts
    wanted: Any = load_balancing_loss_func(output.router_logits, experts, top_k, mask)
    grads += torch.autograd.grad(wanted, gate)

    set_implementation(model, packed=True)
    found = _terms(model, items, top_k).router_loss
    assert found is not None
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    grads += torch.autograd.grad(found, gate)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=0)


def _terms(model: Any, items: list[PackItem], experts_per_token: int) -> LossInputs:
    row = collate(plan_fixed(items, 1, 0.0)[0], 0)
    assert row.forwarded == int(row.multiplicity.sum()) == sum(item.nodes for item in items)
    assert row.tokens < row.forwarded
    return loss_inputs(
        model, row, device=torch.device("cpu"), backend="sdpa", temperature=1.0, weight_version=0,
        experts_per_token=experts_per_token,
    )  # fmt: skip


def test_each_row_adds_its_share_and_the_metric_is_the_mean_over_tokens() -> None:
    model = tiny("qwen3_moe")
    items = groups()
    chosen = LossSettings(**SETTINGS, router_aux_loss_coef=0.5)
    terms = _terms(model, items, 2)
    totals = StepTotals(terms=len(terms.log_probs) * 2, samples=len(items), forwarded=terms.forwarded * 4)
    loss, metrics = policy_loss(terms, chosen, totals)
    without, _ = policy_loss(terms, LossSettings(**SETTINGS), totals)
    assert terms.router_loss is not None
    torch.testing.assert_close(loss - without, 0.5 / 4 * terms.router_loss)
    numerator, denominator = metrics["aux_loss"]
    torch.testing.assert_close(numerator / denominator, terms.router_loss.detach())
    assert float(denominator) == terms.forwarded


def test_the_coefficient_is_the_models_own_unless_given() -> None:
    config = tiny("qwen3_moe").config
    assert router_loss(config, None) == (config.router_aux_loss_coef, 2)
    assert router_loss(config, 0.25) == (0.25, 2)
    assert router_loss(config, 0.0) == (0.0, 0)
    assert router_loss(tiny("qwen3").config, None) == (0.0, 0)
    assert router_loss(tiny("qwen3_vl_moe").config, 0.25) == (0.25, 2)
