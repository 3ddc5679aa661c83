"""Every backend that the machine has, against float64 attention over the whole row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer_core.attention.models import SIZES, VOCABULARY
from trainer_core.attention import layout as layout_module
from trainer_core.attention.backends import BACKENDS, KERNELS, SOFTCAP, attend, choose_backend
from trainer_core.attention.interface import IMPLEMENTATION
from trainer_core.attention.kernels import ScoreRule
from trainer_core.attention.layout import TreeLayout
from trainer_core.model import packed_log_probs
from trainer_core.packing.trie import PrefixTrie

pytestmark = pytest.mark.gpu


def groups(rng: np.random.Generator) -> list[np.ndarray]:
    """Three prompts with eight completions each, of all lengths."""
    found = []
    for _ in range(3):
        prompt = rng.integers(0, 9, rng.integers(1, 500))
        found += [np.concatenate([prompt, rng.integers(0, 9, rng.integers(1, 200))]) for _ in range(8)]
    return found


def turns(rng: np.random.Generator) -> list[np.ndarray]:
    """Conversations that fork at every turn, some of one token: depth 5, up to 8 branches."""
    found = [rng.integers(0, 9, 150)]
    for _ in range(5):
        found += [
            np.concatenate([found[rng.integers(len(found))], rng.integers(0, 9, rng.integers(1, 200))])
            for _ in range(rng.integers(1, 8))
        ]
    return found


def tiny(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.integers(0, 2, rng.integers(2, 12)) for _ in range(40)]


def one(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.integers(0, 9, 500)]


SHAPES = {"grouped heads": (16, 8, 128), "equal heads": (4, 4, 64)}
RULES: dict[str, Any] = {"merged": {}, "gathered": {}, "window": {"window": 200}, "softcap": {"softcap": 5.0}}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [groups, turns, tiny, one], ids=lambda make: make.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_attention(backend: str, batch: Any, shape: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "COPY_LIMIT", float("inf") if rule == "gathered" else 0.0)
    if rule == "gathered" and backend not in KERNELS:
        pytest.skip("never gathers by itself")
    if rule == "softcap" and backend not in SOFTCAP:
        pytest.skip("no softcap")
    device = torch.device("cuda")
    dtype = torch.bfloat16 if backend in KERNELS else torch.float32
    try:
        choose_backend(device, dtype, override=backend)
    except ValueError as error:
        pytest.skip(str(error))
    torch.backends.cuda.matmul.allow_tf32 = False
    trie = PrefixTrie()
    for sequence in batch(np.random.default_rng(7)):
        trie.insert(sequence)
    layout = TreeLayout(trie.layout(), device, backend)
    heads, key_heads, width = SHAPES[shape]
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, count, layout.tokens, width, device=device).to(dtype).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]
    scores = ScoreRule(width**-0.5, **RULES[rule])
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weight = torch.randn(1, layout.tokens, heads, width, device=device, dtype=torch.float64)
    wanted = whole_row(*exact, layout, scores)  # type: ignore[arg-type]
    wanted.backward(weight)
    found = attend(backend)(*tensors, layout, scores)
    found.backward(weight.to(dtype))
    # bf16 operands cost some 3e-3 of the norm; float32 is held to the last digits of its sums
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for name, mine, theirs in [
        ("output", found, wanted),
        *(
            (f"gradient of {part}", mine.grad, theirs.grad)
            for part, mine, theirs in zip("qkv", tensors, exact, strict=True)
        ),
    ]:
        error = float((mine.detach().double() - theirs.detach()).norm() / theirs.detach().norm())
        assert error < tolerance, (name, error)


def whole_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TreeLayout, rule: ScoreRule) -> torch.Tensor:
    """Masked attention over all pairs."""
    token = torch.arange(layout.tokens, device=q.device)
    ends, depths = (torch.from_numpy(array).to(q.device) for array in (layout.subtree_ends, layout.depths))
    sees = (token[None] <= token[:, None]) & (token[:, None] < ends[None])
    if rule.window is not None:
        sees &= depths[:, None] - depths[None] < rule.window
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return (scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_log_probabilities_are_no_noisier_than_two_unpacked_runs(backend: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = torch.device("cuda")
    try:
        choose_backend(device, torch.bfloat16, override=backend)
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "max_position_embeddings": 2048}, head_dim=64)).to(device)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, 300) for _ in range(3)]
    batch = [np.concatenate([prompts[index % 3], rng.integers(0, VOCABULARY, 200)]) for index in range(12)]

    def alone(implementation: str) -> np.ndarray:
        model.set_attn_implementation(implementation)
        found = []
        for sequence in batch:
            tokens = torch.from_numpy(sequence)[None].to(device)
            log_p = model(tokens).logits[0, :-1].float().log_softmax(-1)
            found.append(log_p.gather(1, tokens[0, 1:, None])[:, 0].cpu().numpy())
        return np.concatenate(found)

    with torch.no_grad():
        exact = alone("eager")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            first, second = alone("eager"), alone("sdpa")
            model.set_attn_implementation(IMPLEMENTATION)
            packed = np.concatenate(packed_log_probs(model, batch, backend))
    noise = max(np.abs(first - exact).mean(), np.abs(second - exact).mean())
    assert np.abs(packed - exact).mean() < 1.5 * noise
