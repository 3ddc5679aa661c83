"""Diagnoses of runs whose trouble is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from webapp.metrics.overview import CHARTS
from webapp.runs.diagnosis import WINDOW, Facts, diagnose
from webapp.runs.models import State


def facts(state: str = "running", silent_s: float = 5.0, **recent: Any) -> Facts:
    steady = {
        "reward": 0.5, "loss": 0.0, "grad_norm": 0.4, "kl": 0.002, "perf/step_s": 10.0, "perf/rollout_wait_s": 0.1,
        "rollout/backpressure_s": 0.1, "sample/staleness_mean": 1.0,
    }  # fmt: skip
    values = {name: [value] * WINDOW for name, value in steady.items()}
    for name, value in recent.items():
        key = {"wait": "perf/rollout_wait_s", "held": "rollout/backpressure_s", "kv": "vllm/kv_cache_usage",
               "running": "rollout/concurrency", "cap": "rollout/concurrency_cap", "score": "rollout/score_wait_s",
               "duration": "rollout/duration_s"}.get(name, name)  # fmt: skip
        values[key] = value if isinstance(value, list) else [value] * WINDOW
    return Facts(state=state, recent=values, silent_s=silent_s)


@pytest.mark.parametrize(
    "given,verdict,words",
    [
        (facts(), "balanced", "waits 1%"),
        (facts(wait=4.0), "generation-bound", "40% of its time"),
        (facts(held=3.0), "trainer-bound", "held back 30% of the time; samples are 1.0 updates old of at most 4"),
        (facts(wait=4.0, held=5.0), "trainer-bound", "50%"),
        (facts(silent_s=200.0), "stalled", "nothing new for 3 minutes, where a step usually takes 10 s"),
        (facts(silent_s=110.0), "balanced", ""),
        (facts(silent_s=200.0, **{"perf/step_s": 100.0}), "balanced", ""),
        (facts("completed", silent_s=1e6, wait=4.0), "generation-bound", ""),
        (facts(loss=[0.0] * 18 + [math.nan] * 2), "diverging", "loss is not finite"),
        (facts(grad_norm=[0.4] * 19 + [math.inf]), "diverging", "grad_norm is not finite"),
        (facts(kl=[0.002] * 16 + [0.3] * 4), "diverging", "from 0.002 to 0.3 nats"),
        (facts(kl=[1e-5] * 16 + [0.01] * 4), "balanced", ""),
        (facts(reward=[0.9] * 12 + [0.1] * 8), "diverging", "fell from 0.90 to 0.10"),
        (facts(reward=[0.1 + 0.04 * step for step in range(20)]), "balanced", ""),
        (Facts("queued", "Waits for 2 GPUs."), "waiting", "Waits for 2 GPUs."),
        (Facts("starting"), "starting", "no optimizer step yet"),
        (Facts("running"), "starting", "no optimizer step yet"),
        (Facts("failed", "Out of memory."), "unknown", "Out of memory."),
        (Facts("running", recent={"loss": [1.0]}), "unknown", "Not enough"),
    ],
)
def test_verdicts(given: Facts, verdict: str, words: str) -> None:
    found = diagnose(given)
    assert (found.verdict, words in found.sentence) == (verdict, True), found
    assert found.sentence.endswith(".")
    assert set(found.charts) <= {chart.key for chart in CHARTS}


@pytest.mark.parametrize("state", State.values)
@pytest.mark.parametrize("steps", [0, 1, WINDOW])
def test_every_state_has_a_knob_and_charts_to_look_at(state: str, steps: int) -> None:
    given = facts(state)
    recent = {name: values[:steps] for name, values in given.recent.items()} if steps else {}
    found = diagnose(replace(given, recent=recent))
    assert found.sentence.endswith(".")
    assert found.knob
    assert bool(found.charts) == (state != State.DRAFT)
    assert all(title and not title.islower() for _, title in found.titled_charts)


@pytest.mark.parametrize(
    "given,knob",
    [
        (facts(wait=4.0, score=5.0, duration=6.0), "reward functions"),
        (facts(wait=4.0, kv=0.95), "server.kv_cache_gib"),
        (facts(wait=4.0, running=63.0, cap=64.0), "max_concurrent_rollouts"),
        (facts(wait=4.0), "server_replicas"),
        (facts(held=4.0), "trainer_gpus"),
        (facts(kl=[0.002] * 16 + [0.3] * 4), "learning_rate"),
    ],
)
def test_knobs(given: Facts, knob: str) -> None:
    assert knob in diagnose(given).knob
