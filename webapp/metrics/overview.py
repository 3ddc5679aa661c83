"""The charts that the page of a run begins with: what to look at first, declared once.

`CHARTS` every run has; `charts_of` adds what a run's settings ask for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Chart:
    """One chart. The first metric sets the unit; docs/charts.md says what the kinds look like.

    `limit` is the name of a setting and its value, drawn as a line.
    """

    key: str
    title: str
    kind: Literal["line", "mirror", "stacked"]
    metrics: tuple[str, ...]
    help: str
    limit: tuple[str, float] | None = None

    @property
    def metrics_json(self) -> str:
        return json.dumps(self.metrics)

    @property
    def limit_json(self) -> str:
        """Name and value for the page's script; empty without a limit."""
        return "" if self.limit is None else json.dumps({"name": self.limit[0], "value": self.limit[1]})


CHARTS = (
    Chart("reward", "Reward", "line", ("reward", "rewards/trained_mean"),
          "Of all scored rollouts: how good the policy is. Of those trained on: groups of equal rewards are missing there."),
    Chart("waits", "Who waits for whom", "mirror", ("perf/rollout_wait_s", "rollout/backpressure_s"),
          "Up: the trainer waits for samples (generation-bound). Down: generation is held back (trainer-bound)."),
    Chart("queue", "Samples in the queue", "line", ("sample/rollout_queue_size",),
          "Near zero: the trainer is starving. Growing: generation runs ahead, and staleness will follow."),
    Chart("staleness", "Staleness", "line", ("sample/staleness_mean", "sample/staleness_max"),
          "Weight updates between sampling and training; max_staleness of the run is the bound."),
    Chart("throughput", "Throughput", "line",
          ("perf/forwarded_tok_s_fwd_bwd", "perf/forwarded_tok_s_wall_clock", "rollout/generated_tok_s"),
          "Tokens per second of the trainer, during forward and backward and over the whole step, and of generation."),
    Chart("mfu", "Model FLOPs utilisation", "line", ("perf/mfu_fwd_bwd", "perf/mfu_wall_clock"),
          "On both time bases; shown where the device's peak is known."),
    Chart("step_time", "Where a step's time goes", "stacked",
          ("perf/rollout_wait_s", "perf/planner_s", "perf/fwd_bwd_s", "perf/optimizer_s", "perf/weight_sync_s",
           "perf/checkpoint_s"),
          "Parts of an optimizer step, stacked."),
    Chart("concurrency", "Rollouts in flight", "line", ("rollout/concurrency", "rollout/concurrency_cap", "vllm/waiting"),
          "Against the live cap; waiting requests mean that the server is full."),
    Chart("kv", "KV cache in use", "line", ("vllm/kv_cache_usage", "vllm/prefix_cache_hit_frac"),
          "Share of the server's KV cache, and of prompt tokens it did not have to compute."),
    Chart("batch", "Batch fill and packing", "line", ("batch/row_fill_frac", "batch/packing_ratio"),
          "How full rows are, and the work that sharing prefixes saves."),
    Chart("loss", "Loss", "line", ("loss", "grad_norm"), "The policy loss hovers around zero; read it with the reward."),
    Chart("kl", "KL to the sampler", "line", ("kl", "sampling/mismatch_kl"),
          "How far the trainer is from what generated the samples; growth warns of a collapse."),
    Chart("entropy", "Entropy", "line", ("entropy",), "Falling to zero: the policy no longer explores."),
    Chart("clip", "Clipped tokens", "line",
          ("clip_ratio/low_mean", "clip_ratio/high_mean", "sampling/masked_mean"), "Shares of trained tokens."),
    Chart("lengths", "Completion length", "line",
          ("completions/mean_length", "completions/min_length", "completions/max_length"), "Generated tokens of a rollout."),
    Chart("groups", "Groups that teach nothing", "line", ("frac_reward_zero_std", "completions/clipped_ratio"),
          "Groups whose rewards are all equal; and rollouts cut at the token limit, which often earn nothing."),
    Chart("spread", "Spread of rewards in a group", "line", ("reward_std",),
          "Mean standard deviation of the rewards of a group. At zero nothing is learned: advantages are differences."),
)  # fmt: skip


def charts_of(spec: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The charts of a run with these settings, a RunSpec as JSON; one of another version has what is known of it."""
    limit = spec.get("rollout", {}).get("max_staleness")
    charts = [
        replace(chart, limit=("max_staleness", limit)) if chart.key == "staleness" and limit else chart
        for chart in CHARTS
    ]
    more = []
    if evaluates(spec):
        several = spec["evaluation"].get("num_generations", 1) > 1
        more.append(Chart(
            "evaluation", "Evaluation", "line", ("eval/reward", "eval/pass@1", *(["eval/pass@k"] if several else [])),
            "On prompts that are not trained on: mean reward; share of rollouts with a positive reward"
            + ("; share of prompts with at least one." if several else "."),
        ))  # fmt: skip
    if metrics := reward_metrics([spec]):
        more.append(Chart("rewards", "Reward by function", "line", metrics,
                          "Mean of each reward function over all scored rollouts, before its weight."))  # fmt: skip
    return (charts[0], *more, *charts[1:])


def evaluates(spec: Mapping[str, Any]) -> bool:
    """Whether the run looks from time to time how it does on prompts that it is not trained on."""
    return bool(spec.get("evaluation", {}).get("every_steps"))


def reward_metrics(specs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """A metric for each reward function of the specs that have several: of one alone it would be the reward again."""
    several = [rewards for spec in specs if len(rewards := spec.get("rewards", [])) > 1]
    return tuple(dict.fromkeys(f"rewards/{reward['name']}" for rewards in several for reward in rewards))
