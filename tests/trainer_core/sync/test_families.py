"""Every supported family: what is pushed is what its checkpoint holds; and a real server of some says what the trainer says.

All families against a server: tests/families.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.agreement import ask, difference, disturb, prompts
from tests.tiny_families import MAKERS, tiny_family
from tests.trainer_core.rollout.conftest import first_token
from tests.trainer_core.rollout.conftest import prompts as rows
from tests.trainer_core.sync.test_push import config_for
from tests.vllm_server import running_server, tiny_spec
from trainer_core import AsyncGRPOConfig, AsyncGRPOTrainer
from trainer_core.families import SUPPORTED, adapt_text_only
from trainer_core.model import load_policy, packed_log_probs
from trainer_core.sync import choose_sync
from trainer_core.sync.merged import check_mergeable, merged_weights
from trainer_core.sync.weights import full_weights

LIMIT = 1e-3


def policy(folder: Path) -> Any:
    return load_policy(str(folder), dtype="float32", trust_remote_code=False, init_kwargs=None)


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def adapted(model: Any, rank: int = 4) -> Any:
    config = LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapt_text_only(config, model))


def test_every_supported_family_is_here() -> None:
    assert set(MAKERS) == set(SUPPORTED)


@pytest.mark.parametrize("family", MAKERS)
def test_full_weights_are_those_of_the_checkpoint(family: str) -> None:
    """By name, shape and value, as the checkpoint has them, so that a server knows them; and without what is frozen."""
    folder = tiny_family(family)
    known = checkpoint(folder)
    weights = full_weights(policy(folder))
    for weight in weights:
        made = weight.make()
        assert tuple(made.shape) == weight.shape
        assert torch.equal(made, known[weight.name]), weight.name
    left = known.keys() - {weight.name for weight in weights}
    assert len(weights) == len({weight.name for weight in weights}) == len(known) - len(left)
    assert all(re.search("visual|vision_tower|multi_modal_projector", name) for name in left)
    assert bool(left) == (family in {"gemma3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "gemma3"])
def test_merged_lora_is_a_checkpoint_that_says_the_same(family: str, tmp_path: Path) -> None:
    """The adapter of Qwen3-MoE is also one of the experts, which are one parameter in the model and many in the checkpoint."""
    folder = tiny_family(family)
    model = adapted(policy(folder))
    disturb(model, 1)
    check_mergeable(model)
    tensors = {weight.name: weight.make().contiguous() for weight in merged_weights(model)}
    known = checkpoint(folder)
    assert tensors.keys() <= known.keys()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**known, **tensors}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before, wanted, found = (packed_log_probs(one, prompts()) for one in (policy(folder), model, policy(tmp_path)))
    for number, expected in enumerate(wanted):
        torch.testing.assert_close(found[number], expected, atol=1e-4, rtol=0)
        assert abs(before[number] - expected).max() > 0.05


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "smollm3"])
def test_a_server_says_what_the_trainer_says_after_pushes(family: str, tmp_path: Path) -> None:
    """Full weights, then an adapter merged into them. The output head of both is the embedding."""
    model = policy(tiny_family(family))
    with running_server(tiny_spec(), tiny_family(family), tmp_path / "server.log") as server:
        sync = choose_sync(config=config_for(tmp_path), model=model, server_urls=[server.url])
        sync.open()
        assert difference(ask(server.url, "policy", prompts()), model) < LIMIT
        for version, make in enumerate([lambda: model, lambda: adapted(model)], start=1):
            pushed = make()
            if version == 2:
                sync.close()
                sync = choose_sync(config=config_for(tmp_path), model=pushed, server_urls=[server.url])
                sync.open()
            disturb(pushed, version)
            assert difference(ask(server.url, "policy", prompts()), pushed) > 0.05
            sync.push(pushed, version)
            assert difference(ask(server.url, "policy", prompts()), pushed) < LIMIT
        sync.close()


@pytest.mark.server
@pytest.mark.slow
def test_a_model_with_experts_is_trained_and_its_server_keeps_up(tmp_path: Path) -> None:
    folder = tiny_family("qwen3_moe")
    with running_server(tiny_spec(), folder, tmp_path / "server.log") as server:
        args = AsyncGRPOConfig(
            output_dir=str(tmp_path / "run"), vllm_server_base_url=server.url, num_generations=4, max_steps=3,
            per_device_train_batch_size=8, gradient_accumulation_steps=1, max_staleness=1, save_strategy="no",
            max_completion_length=16, bf16=False, use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        trainer = AsyncGRPOTrainer(str(folder), first_token, args, rows(40))
        trainer.train()
        assert trainer.state.global_step == 3
        said = ask(server.url, "policy", prompts())
        assert difference(said, trainer.model) < LIMIT
        assert difference(said, policy(folder)) > 0.05
    moved = checkpoint(folder)
    still = [weight.name for weight in full_weights(trainer.model) if torch.equal(weight.make(), moved[weight.name])]
    assert not still, "some weights were not trained"
