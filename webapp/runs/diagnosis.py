"""What holds a run back, in one sentence, with the knob to turn and the charts to look at.

`diagnose` is a pure function of recent numbers; `diagnosis_of` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

from django.utils import timezone

from webapp.metrics import reading
from webapp.metrics.overview import CHARTS
from webapp.runs.models import Run, State

Verdict = Literal[
    "waiting", "starting", "stalled", "diverging", "generation-bound", "trainer-bound", "balanced", "unknown"
]

CHART_TITLES = {chart.key: chart.title for chart in CHARTS}
WINDOW = 20
"""Optimizer steps that are looked at."""
HELD = 0.15
"""A side that waits for more than this share of the time is held back by the other one."""
STALLED_AFTER_STEPS, STALLED_AFTER_S = 5, 120.0
"""No news for this many typical steps, and at least this long, is a stall."""
KL_JUMP, KL_LARGE = 5.0, 0.1
"""KL to the sampler that grew by this factor over the window, and is larger than this (nats), warns of a collapse."""
REWARD_LOST = 0.5
"""A reward that fell to this share of the window's best third is a collapse."""

METRICS = (
    "reward", "loss", "grad_norm", "kl", "entropy", "perf/step_s", "perf/rollout_wait_s", "rollout/backpressure_s",
    "sample/rollout_queue_size", "sample/staleness_mean", "rollout/concurrency", "rollout/concurrency_cap",
    "vllm/kv_cache_usage", "rollout/score_wait_s", "rollout/duration_s",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """`recent` holds the latest values of `METRICS`, oldest first; `silent_s` is the time since the last optimizer step."""

    state: str
    reason: str = ""
    recent: Mapping[str, Sequence[float]] = field(default_factory=dict)
    silent_s: float = 0.0
    max_staleness: int = 4
    max_concurrent: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """`knob` is what to turn; `charts` are keys of webapp.metrics.overview.CHARTS (a draft has none to show)."""

    verdict: Verdict
    sentence: str
    knob: str
    charts: tuple[str, ...] = ()

    @property
    def titled_charts(self) -> list[tuple[str, str]]:
        """Key and title of each chart."""
        return [(key, CHART_TITLES[key]) for key in self.charts]


def diagnosis_of(run: Run) -> Diagnosis:
    """Reads the run's latest points (two queries) and diagnoses it."""
    return diagnose(facts_of(run, METRICS))


def facts_of(run: Run, metrics: Sequence[str]) -> Facts:
    """The run's latest points of `metrics`, in two queries."""
    points = reading.recent(run, metrics, WINDOW)
    last = max((float(series["time"][-1]) for series in points.values()), default=0.0)
    rollout = run.spec.get("rollout", {})
    return Facts(
        state=run.state, reason=run.reason, silent_s=timezone.now().timestamp() - last if last else 0.0,
        recent={name: series["value"].tolist() for name, series in points.items()},
        max_staleness=rollout.get("max_staleness", 4), max_concurrent=rollout.get("max_concurrent_rollouts"),
    )  # fmt: skip


def jumped(kl: Sequence[float]) -> tuple[float, float] | None:
    """Where a KL came from and where it is now, when it grew so fast that it warns of a collapse."""
    if len(kl) < 10:
        return None
    before, now = median(kl[: len(kl) // 2]), fmean(kl[-3:])
    return (before, now) if now > KL_LARGE and now > KL_JUMP * max(before, 1e-6) else None


def diagnose(facts: Facts) -> Diagnosis:
    """The first verdict that holds, gravest first."""
    if facts.state == State.DRAFT:
        return Diagnosis("waiting", facts.reason or "Not started yet.", "launching it, or editing it first")
    steps = facts.recent.get("loss", ())
    if facts.state == State.QUEUED and not steps:
        knob = "resources.server_replicas and resources.trainer_gpus: fewer devices are free sooner"
        return Diagnosis("waiting", facts.reason or "Waits in the queue.", knob, ("reward",))
    if not steps:
        if facts.state in (State.STARTING, State.RUNNING):
            text = "Starting: no optimizer step yet. The server loads the model first, then the first rollouts are generated."
            knob = "server.enforce_eager: on, the server starts sooner and generates slower"
            return Diagnosis("starting", text, knob, ("reward", "concurrency"))
        return Diagnosis(
            "unknown", facts.reason or "No optimizer step was made.", "the logs, which say how far it came", ("reward",)
        )
    return _diverging(facts) or _stalled(facts) or _bound(facts)


def _diverging(facts: Facts) -> Diagnosis | None:
    knob = "training.learning_rate: try a third of it; training.max_grad_norm and rollout.max_staleness: lower"
    for name in ("loss", "grad_norm", "reward"):
        recent = facts.recent.get(name, ())
        if any(not math.isfinite(value) for value in recent[-5:]):
            return Diagnosis("diverging", f"Diverging: {name} is not finite any more; what follows is lost.", knob,
                             ("loss", "kl", "reward"))  # fmt: skip
    kl = _finite(facts, "kl")
    if jump := jumped(kl):
        text = f"Diverging: the KL to the sampler jumped from {jump[0]:.3g} to {jump[1]:.3g} nats in {len(kl)} steps."
        return Diagnosis("diverging", text, knob, ("kl", "staleness", "reward"))
    reward = _finite(facts, "reward")
    if len(reward) >= WINDOW:
        third = len(reward) // 3
        best = max(fmean(reward[start : start + third]) for start in range(len(reward) - third))
        now = fmean(reward[-third:])
        if best > 0.1 and now < REWARD_LOST * best:
            text = f"Diverging: the reward fell from {best:.2f} to {now:.2f} within {len(reward)} steps."
            return Diagnosis("diverging", text, knob, ("reward", "kl", "entropy"))
    return None


def _stalled(facts: Facts) -> Diagnosis | None:
    if facts.state != State.RUNNING:
        return None
    step_s = _finite(facts, "perf/step_s")
    limit = max(STALLED_AFTER_S, STALLED_AFTER_STEPS * median(step_s) if step_s else 0.0)
    if facts.silent_s <= limit:
        return None
    usual = f", where a step usually takes {_seconds(median(step_s))}" if step_s else ""
    return Diagnosis(
        "stalled", f"Stalled: nothing new for {_seconds(facts.silent_s)}{usual}. The logs of the trainer and the server "
        "show which of them hangs.", "stop and save, then resume, if the logs stand still", ("waits", "queue"),
    )  # fmt: skip


def _bound(facts: Facts) -> Diagnosis:
    step_s = sum(_finite(facts, "perf/step_s"))
    if step_s <= 0:
        return Diagnosis("unknown", "Not enough is reported yet to tell what holds the run back.", "waiting for a whole step",
                         ("step_time", "reward"))  # fmt: skip
    starving = sum(_finite(facts, "perf/rollout_wait_s")) / step_s
    held = sum(_finite(facts, "rollout/backpressure_s")) / step_s
    if starving > HELD and starving >= held:
        knob, charts = _generation_knob(facts)
        text = f"Generation-bound: the trainer spends {_percent(starving)} of its time waiting for samples."
        return Diagnosis("generation-bound", text, knob, charts)
    if held > HELD:
        staleness = _finite(facts, "sample/staleness_mean")
        note = f"; samples are {fmean(staleness):.1f} updates old of at most {facts.max_staleness}" if staleness else ""
        text = f"Trainer-bound: generation is held back {_percent(held)} of the time{note}."
        knob = "resources.trainer_gpus: more; training.token_budget: pack rows; or fewer samples in a step"
        return Diagnosis("trainer-bound", text, knob, ("waits", "step_time", "staleness"))
    text = f"Balanced: the trainer waits {_percent(starving)} of the time, generation is held {_percent(held)}."
    knob = "resources.server_replicas and resources.trainer_gpus: more of both, if it has to be faster"
    return Diagnosis("balanced", text, knob, ("waits", "throughput"))


def _generation_knob(facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Why generation is the slow side: scoring, a full KV cache, the cap of rollouts in flight, or just the server."""
    scoring, duration = _finite(facts, "rollout/score_wait_s"), _finite(facts, "rollout/duration_s")
    if scoring and duration and fmean(scoring) > 0.3 * fmean(duration):
        return "the reward functions: groups wait to be scored, make scoring faster", ("waits", "concurrency")
    usage = _finite(facts, "vllm/kv_cache_usage")
    if usage and fmean(usage) > 0.8:
        knob = "server.kv_cache_gib or server.gpu_memory_utilization: the KV cache is full; or resources.server_replicas: more"
        return knob, ("kv", "concurrency", "throughput")
    running, cap = _finite(facts, "rollout/concurrency"), _finite(facts, "rollout/concurrency_cap")
    if running and cap and fmean(running) > 0.9 * fmean(cap):
        at_ceiling = facts.max_concurrent is not None and cap[-1] >= facts.max_concurrent
        name = (
            "rollout.max_concurrent_rollouts"
            if at_ceiling
            else "rollout.max_staleness or rollout.max_concurrent_rollouts"
        )
        return f"{name}: higher, more rollouts may be in flight", ("concurrency", "throughput", "kv")
    return (
        "resources.server_replicas: more; rollout.max_staleness: higher; rollout.max_completion_length: shorter",
        ("waits", "throughput", "concurrency"),
    )


def _finite(facts: Facts, name: str) -> list[float]:
    return [value for value in facts.recent.get(name, ()) if math.isfinite(value)]


def _percent(share: float) -> str:
    return f"{min(share, 1.0):.0%}"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} minutes"
    )
