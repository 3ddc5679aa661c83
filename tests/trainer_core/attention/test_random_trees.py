"""A packed row means the same as each sequence alone, for random trees: every family, every backend of the machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.trainer_core.attention.compare import assert_packed_is_alone
from tests.trainer_core.attention.models import FAMILIES, make, tiny
from tests.trainer_core.attention.trees import forests
from trainer_core.attention import blocks as blocks_module

# Few tokens make forks where none were planned; long ones of many tokens fork only where they should.
small = forests(tokens=3, longest=9, most=10)
large = forests(longest=400, most=14)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5)
@given(batch=small)
def test_small_trees(family: str, batch: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "QUERY_BLOCK", 4)  # many blocks, cut segments included
        assert_packed_is_alone(tiny(family), batch)


@pytest.mark.parametrize("family", ["qwen3", "mistral, window", "gemma2", "qwen3_moe"])
@settings(max_examples=4)
@given(batch=large)
def test_large_trees(family: str, batch: list[list[int]]) -> None:
    assert_packed_is_alone(tiny(family), batch)


@settings(max_examples=2)
@given(batch=forests(longest=80, most=6))
def test_trees_of_delta_layers(batch: list[list[int]]) -> None:
    """Shorter: on a CPU transformers goes through the delta rule of each sequence alone in a Python loop."""
    assert_packed_is_alone(tiny("qwen3_5_text"), batch)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral, window"])
@settings(max_examples=2)
@given(batch=forests(longest=60, most=6))
def test_flex_attention_on_a_cpu(family: str, batch: list[list[int]]) -> None:
    """Without gradients: on a CPU torch has no backward pass of it."""
    assert_packed_is_alone(tiny(family), batch, "flex", gradients=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text"])
@settings(max_examples=3)
@given(batch=small)
def test_gradients_through_recomputed_layers(family: str, batch: list[list[int]]) -> None:
    model = make(family).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_packed_is_alone(model, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3)
@given(batch=large)
def test_large_trees_on_a_gpu(family: str, backend: str, batch: list[list[int]]) -> None:
    """In float32. The 16-bit kernels are held to float64 attention in test_gpu.py."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make(family).cuda()
    assert_packed_is_alone(model, batch, backend)
