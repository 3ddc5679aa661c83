"""The loss against a float64 reference written term by term, and against the exact expectation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_core.loss import LossInputs, LossSettings, StepTotals, centering, policy_loss

SETTINGS: dict[str, Any] = {
    "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "clip_min": 0.5, "clip_max": 2.0, "beta": 0.0,
    "score_centering": False, "max_completion_length": 10,
}  # fmt: skip
LOSS_TYPES = ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "gspo"]


def random_inputs(seed: int, lengths: list[int], num_top: int = 3, dtype: torch.dtype = torch.float64) -> LossInputs:
    rng = np.random.default_rng(seed)
    terms = sum(lengths)

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    log_probs = tensor(rng.uniform(-4, -0.5, terms)).requires_grad_()
    top = np.log(rng.dirichlet(np.ones(num_top + 2), terms)[:, :num_top]).reshape(terms, num_top)
    sampler_top = np.log(rng.dirichlet(np.ones(num_top + 2), terms)[:, :num_top]).reshape(terms, num_top)
    if terms:
        sampler_top[0, -1] = -np.inf  # padding
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=tensor(log_probs.detach().numpy() + rng.normal(0, 0.5, terms)),
        sample_index=torch.tensor(np.repeat(np.arange(len(lengths)), lengths)),
        advantages=tensor(rng.normal(size=len(lengths))),
        fresh=torch.tensor(rng.random(len(lengths)) < 0.5),
        entropy=tensor(rng.uniform(0, 3, terms)),
        top_log_probs=tensor(top).requires_grad_(),
        sampler_top_log_probs=tensor(sampler_top),
        ref_log_probs=tensor(log_probs.detach().numpy() + rng.normal(0, 0.2, terms)),
    )


def reference(inputs: LossInputs, s: LossSettings, totals: StepTotals) -> tuple[float, np.ndarray]:
    """Loss, and its gradient with respect to log_probs, from the formulas, one term at a time."""
    lp, old = inputs.log_probs.tolist(), inputs.old_log_probs.tolist()
    index, advantages = inputs.sample_index.tolist(), inputs.advantages.tolist()
    assert inputs.ref_log_probs is not None
    loss, gradient = 0.0, np.zeros(len(lp))
    for t, (p, q) in enumerate(zip(lp, old, strict=True)):
        a = advantages[index[t]]
        mine = [u for u in range(len(lp)) if index[u] == index[t]]
        trusted = [u for u in mine if s.clip_min <= math.exp(lp[u] - old[u]) <= s.clip_max]
        r = math.exp(p - q)
        weight = {
            "dapo": 1 / totals.terms, "bnpo": 1 / totals.terms, "cispo": 1 / totals.terms,
            "grpo": 1 / (len(mine) * totals.samples), "gspo": 1 / (len(mine) * totals.samples),
            "dr_grpo": 1 / (totals.samples * s.max_completion_length),
        }[s.loss_type]  # fmt: skip
        if s.clip_min <= r <= s.clip_max:
            if s.loss_type == "cispo":
                c = min(r, 1 + s.epsilon_high)
                loss -= weight * c * a * p
                gradient[t] -= weight * c * a
            else:
                if s.loss_type == "gspo":
                    r = math.exp(sum(lp[u] - old[u] for u in mine) / len(mine))
                clipped = min(max(r, 1 - s.epsilon), 1 + s.epsilon_high)
                loss -= weight * min(r * a, clipped * a)
                if r * a <= clipped * a:
                    for u in trusted if s.loss_type == "gspo" else [t]:
                        gradient[u] -= weight * r * a * (1 / len(mine) if s.loss_type == "gspo" else 1)
        x = inputs.ref_log_probs.tolist()[t] - p
        loss += weight * s.beta * (math.exp(x) - x - 1)
        gradient[t] += weight * s.beta * (1 - math.exp(x))
    return loss, gradient


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum))
def test_value_and_gradient_are_those_of_the_formulas(loss_type: str, seed: int, lengths: list[int]) -> None:
    chosen = LossSettings(**{**SETTINGS, "loss_type": loss_type, "beta": 0.3})
    totals = StepTotals(terms=17, samples=5)
    inputs = random_inputs(seed, lengths)
    loss, metrics = policy_loss(inputs, chosen, totals)
    loss.backward()
    expected, gradient = reference(inputs, chosen, totals)
    assert loss.item() == pytest.approx(expected, abs=1e-10)
    np.testing.assert_allclose(inputs.log_probs.grad.numpy(), gradient, atol=1e-10)  # type: ignore[union-attr]
    assert metrics["ref_kl"][0].item() > 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_four_rows_of_one_sample_are_one_row_of_four(loss_type: str) -> None:
    chosen = LossSettings(**{**SETTINGS, "loss_type": loss_type, "score_centering": True})
    lengths = [1, 7, 3, 12]
    whole = random_inputs(3, lengths, dtype=torch.float32)
    totals = StepTotals(sum(lengths), len(lengths))
    policy_loss(whole, chosen, totals)[0].backward()
    parts, start = [], 0
    for sample, length in enumerate(lengths):
        cut = slice(start, start + length)
        start += length
        part = LossInputs(
            log_probs=whole.log_probs.detach()[cut].clone().requires_grad_(),
            old_log_probs=whole.old_log_probs[cut],
            sample_index=torch.zeros(length, dtype=torch.long),
            advantages=whole.advantages[sample : sample + 1],
            fresh=whole.fresh[sample : sample + 1],
            entropy=whole.entropy[cut],
            top_log_probs=whole.top_log_probs.detach()[cut].clone().requires_grad_(),
            sampler_top_log_probs=whole.sampler_top_log_probs[cut],
        )
        policy_loss(part, chosen, totals)[0].backward()
        parts.append(part)
    torch.testing.assert_close(torch.cat([p.log_probs.grad for p in parts]), whole.log_probs.grad, atol=1e-7, rtol=0)  # type: ignore[misc]
    torch.testing.assert_close(
        torch.cat([p.top_log_probs.grad for p in parts]), whole.top_log_probs.grad, atol=1e-7, rtol=0
    )  # type: ignore[misc]


def expected_update(
    loss_type: str, logits: torch.Tensor, q: torch.Tensor, head: int, bounds: tuple[float, float]
) -> torch.Tensor:
    """Exact expectation under q of the gradient with respect to the logits, advantage 1, no PPO clip.

    The sampler's head are its `head` most likely tokens.
    """
    chosen = LossSettings(
        **{
            **SETTINGS,
            "loss_type": loss_type,
            "score_centering": True,
            "clip_min": bounds[0],
            "clip_max": bounds[1],
            "epsilon": 0.9999,
            "epsilon_high": 1e9 if loss_type != "cispo" else 0.5,
        }
    )
    top = torch.topk(q, head).indices
    total = torch.zeros_like(logits)
    for token in range(len(q)):
        leaf = logits.clone().requires_grad_()
        log_p = leaf.log_softmax(-1)
        inputs = LossInputs(
            log_probs=log_p[token][None],
            old_log_probs=q.log()[token][None],
            sample_index=torch.zeros(1, dtype=torch.long),
            advantages=torch.ones(1, dtype=logits.dtype),
            fresh=torch.ones(1, dtype=torch.bool),
            entropy=torch.zeros(1, dtype=logits.dtype),
            top_log_probs=log_p[top][None],
            sampler_top_log_probs=q.log()[top][None],
        )
        policy_loss(inputs, chosen, StepTotals(1, 1))[0].backward()
        total += q[token] * leaf.grad
    return total


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize("bounds", [(0.0, 1e9), (0.5, 2.0)])
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_centering_leaves_no_drift_when_the_head_is_the_whole_vocabulary(
    loss_type: str, bounds: tuple[float, float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=9))
    q = torch.tensor(rng.dirichlet(np.ones(9)))
    drift = expected_update(loss_type, logits, q, head=9, bounds=bounds)
    assert drift.abs().max() < 1e-9
    if bounds == (0.5, 2.0):  # and without it there is one, whenever tokens are out of bounds
        ratio = logits.softmax(-1) / q
        if ((ratio < 0.5) | (ratio > 2)).any():
            off = expected_update(loss_type, logits, q, head=1, bounds=bounds)
            assert off.abs().max() > drift.abs().max()


def test_centering_by_hand() -> None:
    """One position, two head tokens, numbers worked out on paper."""
    p, q = [0.5, 0.2], [0.4, 0.05]  # ratios 1.25 (in) and 4 (out of 0.5..2)
    rho = (1 - 0.45) / (1 - 0.7)
    assert not 0.5 <= 1 / rho <= 0.54  # the tail's ratio 0.545 is in bounds, so alpha = 1
    expected = (0.5 - 1 * 0.5) * math.log(0.5) + (0 - 1 * 0.2) * math.log(0.2)
    inputs = LossInputs(
        log_probs=torch.zeros(1),
        old_log_probs=torch.zeros(1),
        sample_index=torch.zeros(1, dtype=torch.long),
        advantages=torch.ones(1),
        fresh=torch.ones(1, dtype=torch.bool),
        entropy=torch.zeros(1),
        top_log_probs=torch.tensor([p]).log(),
        sampler_top_log_probs=torch.tensor([q]).log(),
    )
    chosen = LossSettings(**{**SETTINGS, "score_centering": True})
    assert centering(inputs, chosen, torch.ones(1)).item() == pytest.approx(expected, abs=1e-6)


def test_metrics_by_hand() -> None:
    """Ratios 1.5 and 0.7 with positive, 0.7 and 3 with negative advantage."""
    ratios = torch.tensor([1.5, 0.7, 0.7, 3.0], dtype=torch.float64)
    inputs = LossInputs(
        log_probs=ratios.log(),
        old_log_probs=torch.zeros(4, dtype=torch.float64),
        sample_index=torch.tensor([0, 0, 1, 1]),
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        fresh=torch.tensor([True, False]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        top_log_probs=torch.log(torch.tensor([[0.5]] * 4)),
        sampler_top_log_probs=torch.log(torch.tensor([[0.25]] * 4)),
    )
    _, metrics = policy_loss(inputs, LossSettings(**SETTINGS), StepTotals(4, 2))
    pairs = {name: value if isinstance(value, tuple) else (value, torch.ones(())) for name, value in metrics.items()}
    found = {name: (numerator / denominator).item() for name, (numerator, denominator) in pairs.items()}
    k3 = [r - 1 - math.log(r) for r in (1.5, 0.7, 0.7, 3.0)]
    expected = {
        "ratio": 5.9 / 4, "kl": sum(k3) / 4, "entropy": 2.5, "clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.25,
        "clip_ratio/region_mean": 0.5, "clip_ratio/low_min": 0.0, "clip_ratio/high_max": 0.5,
        "sampling/masked_mean": 0.25, "sampling/mismatch_kl": (k3[0] + k3[1]) / 2, "sampling/sampler_mass": 0.25,
    }  # fmt: skip
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_row_without_terms_costs_nothing() -> None:
    inputs = random_inputs(0, [])
    loss, metrics = policy_loss(inputs, LossSettings(**{**SETTINGS, "score_centering": True}), StepTotals(4, 2))
    loss.backward()
    assert loss.item() == 0
    assert set(metrics) <= {"ref_kl"}
