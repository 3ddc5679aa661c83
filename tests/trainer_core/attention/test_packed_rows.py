"""Scores of a packed row, the public entry for them, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

import trainer_core
from tests.trainer_core.attention.compare import alone
from tests.trainer_core.attention.models import DELTA, FAMILIES, SIZES, VOCABULARY, make, set_implementation, tiny
from trainer_core import scoring
from trainer_core.attention.backends import choose_backend
from trainer_core.families import SUPPORTED, check_model
from trainer_core.model import packed_log_probs
from trainer_core.scoring import ScoreRequest, install_scoring


@settings(max_examples=25)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([None, 3.0]),
    st.integers(0, 1000),
)
def test_scores_and_their_gradients_against_float64(
    positions: int, top: int, temperature: float, softcap: float | None, seed: int
) -> None:
    assert_scores(positions, top, temperature, softcap, seed, VOCABULARY, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("positions", "vocabulary"), [(1, 40), (7, 3001), (64, 40_000)])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 3.0)])
def test_scores_and_their_gradients_on_a_gpu(
    positions: int, vocabulary: int, temperature: float, softcap: float | None
) -> None:
    """One kernel makes normaliser and entropy there. Vocabularies that fill its blocks and that do not."""
    assert_scores(positions, 3, temperature, softcap, 0, vocabulary, "cuda")


def assert_scores(
    positions: int, top: int, temperature: float, softcap: float | None, seed: int, vocabulary: int, device: str
) -> None:
    """Target, entropy and top log-probabilities of chunked scoring, and the hand-written backward pass."""
    generator = torch.Generator().manual_seed(seed)
    terms = positions + 3
    hidden = torch.randn(positions, 8, generator=generator)
    weight = torch.randn(vocabulary, 8, generator=generator)
    targets = torch.randint(vocabulary, (positions,), generator=generator)
    owner = torch.sort(torch.randint(positions, (terms,), generator=generator)).values
    top_ids = torch.randint(vocabulary, (terms, top), generator=generator)
    grads = [torch.randn(positions, generator=generator), torch.randn(terms, top, generator=generator)]

    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = exact_hidden @ exact_weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    expected = [log_p.gather(1, targets[:, None])[:, 0], log_p[owner].gather(1, top_ids)]
    sum((value * grad).sum() for value, grad in zip(expected, grads, strict=True)).backward()  # type: ignore[union-attr]

    head = torch.nn.Linear(8, vocabulary, bias=False, device=device)
    head.weight = torch.nn.Parameter(weight.to(device))

    class Model(torch.nn.Module):
        config = Qwen3Config(**SIZES)

        def get_output_embeddings(self) -> Any:
            return head

    Model.config.final_logit_softcapping = softcap
    install_scoring(Model())  # type: ignore[arg-type]
    leaf = hidden.to(device, copy=True).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scoring.LOGIT_BYTES, device, 4 * vocabulary * 2)  # two positions a chunk
        first_terms = np.searchsorted(owner.numpy(), np.arange(positions + 1))
        head.pending = ScoreRequest(  # type: ignore[assignment]
            *(tensor.to(device) for tensor in (targets, top_ids, owner)), first_terms, temperature
        )
        log_probs, entropy, top_log_probs = head(leaf[None])
        ((log_probs.cpu() * grads[0]).sum() + (top_log_probs.cpu() * grads[1]).sum()).backward()
    torch.testing.assert_close(log_probs.cpu().double(), expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(top_log_probs.cpu().double(), expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.cpu().double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(leaf.grad.cpu().double(), exact_hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.weight.grad.cpu().double(), exact_weight.grad, atol=1e-4, rtol=1e-5)


def test_the_public_entry_takes_odd_batches_and_leaves_the_model_as_it_was() -> None:
    model = make("qwen3")
    model.set_attn_implementation("sdpa")
    assert trainer_core.packed_log_probs(model, []) == []
    single = trainer_core.packed_log_probs(model, [[5], [6]])
    assert [(one.shape, one.dtype) for one in single] == [((0,), np.float32)] * 2
    whole = [7, 8, 9, 7, 8]
    batch = [whole, [7, 8, 9], whole, [7], np.array(whole, np.int32), tuple(whole), torch.tensor(whole)]
    found = trainer_core.packed_log_probs(model, batch)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = alone(model, whole).numpy()
    for one in (found[0], found[2], found[4], found[5], found[6]):
        np.testing.assert_allclose(one, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found[1], expected[:2], atol=1e-5, rtol=0)
    assert len(found[3]) == 0
    assert model.config._attn_implementation == "sdpa"
    assert model(torch.tensor([whole])).logits.shape == (1, 5, VOCABULARY)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ([[1, 2], []], "sequence 1 is empty; each needs at least one token"),
        ([[1, 40]], "sequence 0 holds the token id 40; the model has 0 to 39"),
        ([[1, -3]], "sequence 0 holds the token id -3; the model has 0 to 39"),
        ([[1.5, 2.0]], "sequence 0 is an array of float64"),
        ([[[1, 2]]], r"sequence 0 is an array of int64 \(1, 2\); a list of token ids is needed"),
    ],
)
def test_the_public_entry_refuses_what_are_no_tokens(batch: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        packed_log_probs(tiny("qwen3"), batch)


def test_bf16_is_no_noisier_than_two_unpacked_runs() -> None:
    model = make("llama")
    batch = [[1, 2, 3, *np.random.default_rng(index).integers(0, VOCABULARY, 20).tolist()] for index in range(6)]
    with torch.no_grad():
        set_implementation(model, packed=False)
        exact = [alone(model, sequence) for sequence in batch]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = [alone(model, sequence).float() for sequence in batch]
            packed = packed_log_probs(model, batch)
    noise = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    found = max(float(np.abs(a.numpy() - b).max()) for a, b in zip(exact, packed, strict=True))
    assert found < 2 * noise


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_accepted_by_its_config(family: str) -> None:
    check_model(tiny(family).config)


def test_refusals_name_the_model_and_what_is_supported() -> None:
    assert set(SUPPORTED) == {tiny(family).config.model_type for family in FAMILIES}
    with pytest.raises(
        NotImplementedError, match=r"model type 'gpt_oss' is not supported; supported are Llama \(SmolLM2\), "
    ):
        check_model(AutoConfig.for_model("gpt_oss"))
    hybrid = Qwen3Config(**SIZES)
    hybrid.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(
        NotImplementedError, match="model type 'qwen3' has layers of kind linear_attention, which would mix"
    ):
        check_model(hybrid)
    check_model(Qwen3_5TextConfig(**DELTA))
    for rope in ("dynamic", "longrope"):
        stretched = LlamaConfig(**SIZES)
        stretched.rope_parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
        with pytest.raises(
            NotImplementedError, match=f"rotary embeddings of type '{rope}', which depend on the longest"
        ):
            check_model(stretched)
    bidirectional = tiny("gemma3_text").config.__class__(**SIZES, use_bidirectional_attention=True)
    with pytest.raises(NotImplementedError, match="'gemma3_text' sets use_bidirectional_attention; only attention to"):
        check_model(bidirectional)
    with pytest.raises(NotImplementedError, match="model type 'mamba' is not supported"):
        packed_log_probs(_Mamba(), [[1, 2]])  # type: ignore[arg-type]


class _Mamba:
    config = AutoConfig.for_model("mamba")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="attention backend 'none' does not exist; there are fa3-hub"):
        choose_backend(torch.device("cpu"), override="none")


def test_generating_without_a_layout_says_what_to_do() -> None:
    model = tiny("llama")
    set_implementation(model, packed=True)
    with pytest.raises(ValueError, match="needs the argument tree_layout"):
        model(torch.tensor([[1, 2, 3]]))
