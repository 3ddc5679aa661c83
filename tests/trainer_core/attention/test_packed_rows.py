"""A packed row must mean the same as each sequence alone: log-probabilities, entropy and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer_core.attention import blocks as blocks_module
from trainer_core.attention.backends import choose_backend
from trainer_core.attention.interface import IMPLEMENTATION, check_attention
from trainer_core.model import ScoreRequest, install_scoring, packed_log_probs, score_row
from trainer_core.packing.trie import PrefixTrie, edge_keys

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    head_dim = SIZES["hidden_size"] // 4
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=head_dim)),
        "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
        "qwen3 with a window in one layer": lambda: Qwen3ForCausalLM(
            Qwen3Config(
                **SIZES,
                head_dim=SIZES["hidden_size"] // 4,
                sliding_window=5,
                use_sliding_window=True,
                max_window_layers=1,
            )
        ),
    }
    model = models[kind]().float()
    install_scoring(model)
    return model


KINDS = ("llama", "qwen2", "qwen3", "mistral with a window", "qwen3 with a window in one layer")
MODELS = {kind: tiny(kind) for kind in KINDS}

# Few distinct tokens at the start make deep and bushy trees.
trees = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=8)
    ),
    min_size=1,
    max_size=6,
).map(lambda pairs: [head + tail for head, tail in pairs])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that every test has many, cut segments included."""
    monkeypatch.setattr(blocks_module, "QUERY_BLOCK", 4)


def alone(model: Any, sequence: list[int]) -> torch.Tensor:
    """Log-probabilities of tokens 1.. by transformers' own attention."""
    model.set_attn_implementation("eager")
    tokens = torch.tensor([sequence])
    return model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(batch=trees)
def test_log_probabilities_are_those_of_each_sequence_alone(kind: str, batch: list[list[int]]) -> None:
    model = MODELS[kind]
    with torch.no_grad():
        expected = [alone(model, sequence).numpy() for sequence in batch]
    model.set_attn_implementation(IMPLEMENTATION)
    for found, wanted in zip(packed_log_probs(model, batch), expected, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral with a window"])
@pytest.mark.parametrize("checkpointing", [False, True])
@settings(deadline=None, max_examples=6)
@given(batch=trees, seed=st.integers(0, 1000))
def test_gradients_are_the_sum_of_those_alone(
    kind: str, checkpointing: bool, batch: list[list[int]], seed: int
) -> None:
    model = MODELS[kind].train()
    weights = [
        torch.tensor(np.random.default_rng([seed, i]).normal(size=len(s) - 1)).float() for i, s in enumerate(batch)
    ]
    model.zero_grad()
    for sequence, weight in zip(batch, weights, strict=True):
        (alone(model, sequence) * weight).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.set_attn_implementation(IMPLEMENTATION)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.zero_grad()
    trie = PrefixTrie()
    keys = [edge_keys(np.array(sequence)) for sequence in batch]
    for key in keys:
        trie.insert(key)
    layout, positions = trie.layout()
    places = [positions.of(key) for key in keys]
    targets = np.zeros(trie.tokens, np.int64)
    for sequence, place in zip(batch, places, strict=True):
        targets[place] = sequence[1:]
    empty = torch.zeros(0, dtype=torch.long)
    request = ScoreRequest(torch.from_numpy(targets), empty.reshape(0, 0), empty, 1.0)
    scores = score_row(model, layout, torch.arange(trie.tokens), request, "sdpa")
    loss = sum(
        (scores.log_probs[torch.from_numpy(place)] * weight).sum()
        for place, weight in zip(places, weights, strict=True)
    )
    loss.backward()  # type: ignore[union-attr]
    model.gradient_checkpointing_disable()
    for name, parameter in model.named_parameters():
        scale = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(parameter.grad / scale, expected[name] / scale, atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 3), st.sampled_from([1.0, 0.7]), st.integers(0, 1000))
def test_scores_and_their_gradients_against_float64(positions: int, top: int, temperature: float, seed: int) -> None:
    """Target, entropy and top log-probabilities of chunked scoring, and the hand-written backward pass."""
    generator = torch.Generator().manual_seed(seed)
    terms = positions + 3
    hidden = torch.randn(positions, 8, generator=generator)
    weight = torch.randn(VOCABULARY, 8, generator=generator)
    targets = torch.randint(VOCABULARY, (positions,), generator=generator)
    owner = torch.sort(torch.randint(positions, (terms,), generator=generator)).values
    top_ids = torch.randint(VOCABULARY, (terms, top), generator=generator)
    grads = [torch.randn(positions, generator=generator), torch.randn(terms, top, generator=generator)]

    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (exact_hidden @ exact_weight.T / temperature).log_softmax(-1)
    expected = [log_p.gather(1, targets[:, None])[:, 0], log_p[owner].gather(1, top_ids)]
    sum((value * grad).sum() for value, grad in zip(expected, grads, strict=True)).backward()  # type: ignore[union-attr]

    head = torch.nn.Linear(8, VOCABULARY, bias=False)
    head.weight = torch.nn.Parameter(weight)

    class Model:
        def get_output_embeddings(self) -> Any:
            return head

    install_scoring(Model())  # type: ignore[arg-type]
    import trainer_core.model as model_module

    leaf = hidden.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_module.LOGIT_BYTES, "cpu", 4 * VOCABULARY * 2)  # two positions a chunk
        head.pending = ScoreRequest(targets, top_ids, owner, temperature)  # type: ignore[assignment]
        log_probs, entropy, top_log_probs = head(leaf[None])
        ((log_probs * grads[0]).sum() + (top_log_probs * grads[1]).sum()).backward()
    torch.testing.assert_close(log_probs.double(), expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(top_log_probs.double(), expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(leaf.grad.double(), exact_hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.weight.grad.double(), exact_weight.grad, atol=1e-4, rtol=1e-5)


def test_bf16_is_no_noisier_than_two_unpacked_runs() -> None:
    model = MODELS["llama"].eval()
    batch = [[1, 2, 3, *np.random.default_rng(index).integers(0, VOCABULARY, 20).tolist()] for index in range(6)]
    with torch.no_grad():
        exact = [alone(model, sequence) for sequence in batch]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = [alone(model, sequence).float() for sequence in batch]
            model.set_attn_implementation(IMPLEMENTATION)
            packed = packed_log_probs(model, batch)
    noise = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    found = max(float(np.abs(a.numpy() - b).max()) for a, b in zip(exact, packed, strict=True))
    assert found < 2 * noise


def test_refusals_name_the_model() -> None:
    check_attention(LlamaConfig(**SIZES))
    hybrid = Qwen3Config(**SIZES)
    hybrid.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(NotImplementedError, match="model type 'qwen3' has layers of kind linear_attention"):
        check_attention(hybrid)
    softcapped = LlamaConfig(**SIZES)
    softcapped.attn_logit_softcapping = 30.0
    with pytest.raises(NotImplementedError, match="sets attn_logit_softcapping"):
        check_attention(softcapped)
    other = LlamaConfig(**SIZES)
    other.model_type = "gpt_oss"
    with pytest.raises(NotImplementedError, match="model type 'gpt_oss' is not supported"):
        check_attention(other)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="attention backend 'none' does not exist; there are fa3-hub"):
        choose_backend(torch.device("cpu"), override="none")


def test_generating_without_a_layout_says_what_to_do() -> None:
    model = MODELS["llama"]
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(ValueError, match="needs the argument tree_layout"):
        model(torch.tensor([[1, 2, 3]]))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_on_a_gpu(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities and gradients of a row with many blocks, in full float32."""
    monkeypatch.setattr(blocks_module, "QUERY_BLOCK", 16)
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setitem(SIZES, "hidden_size", 64)  # FlexAttention needs heads of 16
    model = tiny(kind).cuda().train()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, 20).tolist() for _ in range(3)]
    batch = [prompts[index % 3] + rng.integers(0, VOCABULARY, 25).tolist() for index in range(12)]
    model.set_attn_implementation("eager")
    expected = []
    for sequence in batch:
        tokens = torch.tensor([sequence], device="cuda")
        log_p = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        log_p.sum().backward()
        expected.append(log_p.detach().cpu().numpy())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.set_attn_implementation(IMPLEMENTATION)
    for found, wanted in zip(packed_log_probs(model, batch, backend), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0)

    model.zero_grad()
    trie = PrefixTrie()
    keys = [edge_keys(np.array(sequence)) for sequence in batch]
    for key in keys:
        trie.insert(key)
    layout, positions = trie.layout()
    places = np.concatenate([positions.of(key) for key in keys])
    targets = np.zeros(trie.tokens, np.int64)
    targets[places] = np.concatenate([sequence[1:] for sequence in batch])
    empty = torch.zeros(0, dtype=torch.long, device="cuda")
    request = ScoreRequest(torch.from_numpy(targets).cuda(), empty.reshape(0, 0), empty, 1.0)
    scores = score_row(model, layout, torch.arange(trie.tokens, device="cuda"), request, backend)
    scores.log_probs[torch.from_numpy(places).cuda()].sum().backward()
    for name, parameter in model.named_parameters():
        scale = float(gradients[name].abs().max()) + 1e-6
        torch.testing.assert_close(parameter.grad / scale, gradients[name] / scale, atol=5e-5, rtol=0)
