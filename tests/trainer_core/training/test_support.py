"""Log-probabilities over the sampler's support: a real distribution, cut by top-k and top-p as a server does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_core.attention.models import VOCABULARY, set_implementation, tiny
from tests.trainer_core.training.test_loss import SETTINGS
from trainer_core.loss import LossInputs, LossSettings, StepTotals, over_support, policy_loss
from trainer_core.packing.collator import collate
from trainer_core.packing.planner import PackItem, plan_fixed
from trainer_core.rollout.types import RolloutSample, Support
from trainer_core.row_loss import loss_inputs

TEMPERATURE = 0.8


def cut(log_p: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Token ids that a sampler keeps: the top_k likeliest, and of these the fewest with `top_p` of their mass."""
    order = np.argsort(-log_p)[:top_k]
    p = np.exp(log_p[order])
    p /= p.sum()
    return order[: int(np.searchsorted(np.cumsum(p), top_p)) + 1]


def restricted(log_p: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return log_p[ids] - np.log(np.exp(log_p[ids]).sum())


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 9), st.floats(0.2, 1.0))
def test_the_expected_gradient_is_zero_where_trainer_and_sampler_agree(seed: int, top_k: int, top_p: float) -> None:
    """E_q[∇ log p_S] = 0 for q = p_S. Over the whole vocabulary it is not, and the ratio is the support's mass."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=9), requires_grad=True)
    log_p = logits.log_softmax(-1)
    ids = cut(log_p.detach().numpy(), top_k, top_p)
    q = torch.tensor(np.exp(restricted(log_p.detach().numpy(), ids)))
    tokens = torch.tensor(ids)
    support = log_p[tokens].expand(len(ids), -1)
    present = torch.ones(len(ids), len(ids), dtype=torch.bool)
    found, top, entropy = over_support(log_p[tokens], log_p[tokens][:, None], support, present)
    torch.testing.assert_close((found - q.log()).exp(), torch.ones_like(q))
    torch.testing.assert_close(top[:, 0], found)
    torch.testing.assert_close(entropy, -(q * q.log()).sum().expand(len(ids)))
    settings_ = LossSettings(**SETTINGS)
    total = torch.zeros_like(logits)
    for place, weight in enumerate(q):
        inputs = _one_term(found[place], q.log()[place])
        loss, metrics = policy_loss(inputs, settings_, StepTotals(1, 1))
        assert abs(float(metrics["ratio"][0]) - 1) < 1e-9
        total += weight * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert total.abs().max() < 1e-12


def _one_term(log_prob: torch.Tensor, old: torch.Tensor) -> LossInputs:
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    return LossInputs(
        log_probs=log_prob[None], old_log_probs=old[None], sample_index=torch.zeros(1, dtype=torch.long),
        advantages=zero + 1, fresh=torch.ones(1, dtype=torch.bool), entropy=zero, top_log_probs=nothing,
        sampler_top_log_probs=nothing,
    )  # fmt: skip


def test_a_row_without_a_set_keeps_its_values_and_gradients() -> None:
    log_p = torch.tensor([-1.0, -2.0], requires_grad=True)
    support = torch.tensor([[-1.0, -3.0], [-5.0, -6.0]], requires_grad=True)
    present = torch.tensor([[True, True], [False, False]])
    found, _, entropy = over_support(log_p, log_p[:, None], support, present)
    found.sum().backward()
    assert found[1] == -2.0
    assert entropy[1] == 0
    assert torch.isfinite(support.grad).all()  # type: ignore[arg-type]
    assert support.grad[1].tolist() == [0, 0]  # type: ignore[index]


def test_a_packed_row_has_the_samplers_ratios() -> None:
    """Two samples drawn with top-k and top-p from the model itself, one without a set, two that share a position."""
    model = tiny("qwen3")
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 5).tolist()
    drawn = [_draw(model, prompt, rng) for _ in range(2)]
    samples = [*(_sample(f"{number}", *one) for number, one in enumerate(drawn)), _sample("twice", *drawn[0])]
    whole = _sample("whole", *drawn[1])
    whole.support = None
    set_implementation(model, packed=True)
    items: list[Any] = [PackItem.of(sample) for sample in [*samples, whole]]
    row = collate(plan_fixed(items, 1, 0.0)[0], 2)
    assert row.support_ids.shape[1] == max(int(sample.support.counts.max()) for sample in samples)  # type: ignore[union-attr]
    with torch.no_grad():
        terms = loss_inputs(
            model,
            row,
            device=torch.device("cpu"),
            backend="sdpa",
            temperature=TEMPERATURE,
            weight_version=0,
            reference=model,
        )
    known = (terms.sample_index < 3).numpy()
    ratio = (terms.log_probs - terms.old_log_probs).exp().numpy()
    np.testing.assert_allclose(ratio[known], 1, atol=1e-5)
    assert (ratio[~known] < 1).any()  # the whole vocabulary: biased by the mass of the support
    assert (ratio[~known] < 1 + 1e-5).all()
    held = np.isfinite(terms.sampler_top_log_probs.numpy()) & known[:, None]
    np.testing.assert_allclose(terms.top_log_probs.numpy()[held], terms.sampler_top_log_probs.numpy()[held], atol=1e-5)
    assert terms.ref_log_probs is not None
    torch.testing.assert_close(terms.ref_log_probs, terms.log_probs)
    assert (
        row.forwarded == int(row.multiplicity.sum()) == sum(len(sample.input_ids) - 1 for sample in [*samples, whole])
    )


def _draw(
    model: Any, prompt: list[int], rng: np.random.Generator
) -> tuple[list[int], list[float], list[np.ndarray], Any]:
    set_implementation(model, packed=False)
    ids, log_probs, supports, tops = list(prompt), [], [], []
    for step in range(6):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double() / TEMPERATURE
        log_p = logits.log_softmax(-1).numpy()
        kept = cut(log_p, 2 + step, 0.9)
        q = restricted(log_p, kept)
        choice = int(rng.choice(len(kept), p=np.exp(q)))
        tops.append([(int(kept[place]), q[place]) if place < len(kept) else (0, -np.inf) for place in range(2)])
        ids.append(int(kept[choice]))
        log_probs.append(float(q[choice]))
        supports.append(kept)
    return ids, log_probs, supports, tops


def _sample(name: str, ids: list[int], log_probs: list[float], supports: list[np.ndarray], tops: Any) -> RolloutSample:
    prompt = len(ids) - len(log_probs)
    counts = np.array([0] * prompt + [len(one) for one in supports])
    top_ids = np.zeros((len(ids), 2), np.int32)
    top = np.full((len(ids), 2), -np.inf, np.float32)
    top_ids[prompt:] = [[token for token, _ in one] for one in tops]
    top[prompt:] = [[value for _, value in one] for one in tops]
    return RolloutSample(
        group_id="0", rollout_id=name, row_index=0, epoch=0, weight_version=0, input_ids=np.array(ids, np.int32),
        completion_mask=np.array([0] * prompt + [1] * len(log_probs), np.int8),
        log_probs=np.array([0.0] * prompt + log_probs, np.float32), advantage=1.0, reward=0.0, truncated=False,
        queued_at=0.0, group_size=4, top_ids=top_ids, top_log_probs=top,
        support=Support(counts, np.concatenate(supports).astype(np.int32)),
    )  # fmt: skip
