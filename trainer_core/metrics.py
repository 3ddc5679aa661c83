"""The metric table: every metric is declared here once.

The trainer reduces by it, the web app takes stage, unit and help from it. Light: no torch, no numpy.

A "step" is always a full optimizer step. Names with <name> stand for one metric per function, tool or device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Reduction = Literal["mean", "ratio", "sum", "max", "min", "last"]
"""How values logged between two log lines become one: `ratio` values are (numerator, denominator) pairs, summed apart."""

STAGES = (
    "training", "rewards", "queue", "sample", "batch", "perf", "rollout", "completions", "tools", "environments", "server",
    "system",
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """One metric. `name` may hold a placeholder in angle brackets; `unit` is '' for a plain number."""

    name: str
    stage: str
    unit: str
    reduction: Reduction
    help: str

    @property
    def pattern(self) -> re.Pattern[str]:
        parts = re.split(r"<\w+>", self.name)
        return re.compile(".+".join(re.escape(part) for part in parts))


def _rows(stage: str, text: str) -> Iterable[Metric]:
    for line in text.strip().splitlines():
        name, unit, reduction, help_ = (cell.strip() for cell in line.split("|"))
        yield Metric(name, stage, unit, reduction, help_)  # type: ignore[arg-type]


METRICS: tuple[Metric, ...] = (
    *_rows("training", """
        loss | | mean | Policy loss of the optimizer step, normalised over all its tokens and ranks.
        grad_norm | | mean | Gradient norm before clipping.
        learning_rate | | last | Learning rate of the step.
        epoch | | last | Distinct prompts trained on, divided by the prompts of the dataset.
        ratio | | ratio | Mean trainer/sampler probability ratio over trained tokens; healthy is close to 1.
        kl | nats | ratio | k3 estimate of KL(sampler, trainer) over trained tokens.
        entropy | nats | ratio | Mean entropy of the trainer's distribution at trained tokens.
        clip_ratio/low_mean | | ratio | Share of trained tokens clipped from below (negative advantage).
        clip_ratio/high_mean | | ratio | Share of trained tokens clipped from above (positive advantage).
        clip_ratio/region_mean | | ratio | Share of trained tokens clipped on either side.
        clip_ratio/low_min | | min | Lowest share of a sample's tokens clipped from below.
        clip_ratio/high_max | | max | Highest share of a sample's tokens clipped from above.
        aux_loss | | mean | Load-balancing loss of a mixture-of-experts model.
        ref_kl | nats | ratio | k3 estimate of KL(trainer, reference), when beta is above 0.
        sampling/masked_mean | | ratio | Share of trained tokens whose ratio to the sampler left the allowed range.
        sampling/sampler_mass | | ratio | Sampler probability covered by the top tokens that score centering uses.
        sampling/mismatch_kl | nats | ratio | k3 between sampler and trainer on samples of the current weights only.
        sampling/step0_max_abs_diff | nats | max | Largest log-probability difference to the server before any update.
    """),
    *_rows("rewards", """
        reward | | mean | Mean weighted reward of all scored rollouts: how good the policy is. Dropped groups count.
        reward_std | | mean | Mean standard deviation (dividing by n) of rewards inside a group; all scored groups, dropped too.
        rewards/<function> | | mean | Mean of one reward function over scored rollouts.
        rewards/<function>/error_total | | sum | Scoring calls of this function that raised or returned nonsense.
        rewards/<function>/timeout_total | | sum | Scoring calls of this function that ran into the deadline.
        rewards/trained_mean | | mean | Mean weighted reward of the samples trained on, which lack groups of equal rewards.
        frac_reward_zero_std | | ratio | Share of scored groups whose rewards are all equal; they teach nothing.
        eval/reward | | mean | Mean reward on the evaluation set.
        eval/pass@1 | | mean | Share of evaluation rollouts that pass: their reward is above 0, or what the run says.
        eval/pass@<count> | | mean | Estimated share of evaluation prompts of which one of so many rollouts passes.
        eval/duration_s | s | mean | How long the evaluation took; the trainer waits for it.
        eval/pass@k | | mean | Share of evaluation prompts with at least one rollout that passes.
    """),
    *_rows("queue", """
        sample/rollout_queue_size | samples | mean | Scored samples waiting when the trainer pulls one.
        sample/time_in_queue_s | s | mean | How long a sample waited in the queue.
        perf/rollout_wait_s | s | sum | Time of the step the trainer spent waiting for samples: it starves.
        rollout/backpressure_s | s | sum | Time the rollout side was held by a full queue or by the staleness bound.
    """),
    *_rows("sample", """
        sample/staleness_mean | updates | mean | Weight updates between sampling and training.
        sample/staleness_max | updates | max | The stalest sample of the step.
        sample/dropped_stale_total | samples | sum | Samples dropped because they exceeded max_staleness.
        sample/forwarded_tokens_mean | tokens | mean | Raw tokens of a sample: prompt, tool results and completion.
        sample/forwarded_tokens_max | tokens | max | Raw tokens of the longest sample.
        sample/trained_tokens_mean | tokens | mean | Tokens of a sample that carry loss.
    """),
    *_rows("batch", """
        batch/samples_per_step | samples | mean | Samples of the optimizer step, all ranks.
        batch/samples_per_row | samples | mean | Samples packed into one row.
        batch/groups_per_step | groups | mean | Distinct groups of the optimizer step.
        batch/microbatches_per_step | | mean | Micro-batches of the optimizer step.
        batch/forwarded_tokens_per_step | tokens | mean | Unique tokens forwarded in the optimizer step.
        batch/trained_tokens_per_step | tokens | mean | Tokens with loss in the optimizer step.
        batch/row_tokens_mean | tokens | mean | Unique tokens of a row.
        batch/row_tokens_max | tokens | max | Unique tokens of the longest row.
        batch/row_fill_frac | | mean | Unique tokens of a row divided by the token budget.
        batch/row_imbalance | | mean | Cost of the heaviest row divided by the mean of its micro-batch.
        batch/pad_frac | | mean | Share of padding in what is sent between ranks.
        batch/packing_ratio | | ratio | Raw tokens divided by unique tokens: the work that packing saves.
        batch/masked_token_frac | | ratio | Share of unique tokens that carry no loss.
        batch/dropped_oversize_total | samples | sum | Samples longer than the token budget.
    """),
    *_rows("perf", """
        perf/step_s | s | mean | Wall time of an optimizer step.
        perf/fwd_bwd_s | s | sum | Forward and backward of the step.
        perf/fwd_s | s | sum | Forward of the step.
        perf/optimizer_s | s | mean | Optimizer update.
        perf/planner_s | s | sum | Planning and packing rows.
        perf/dispatch_s | s | sum | Giving the other trainer ranks their rows.
        perf/dispatch_mib | MiB | sum | Size of the rows that the other trainer ranks were given.
        perf/forwarded_tok_s_fwd_bwd | tok/s | mean | Unique tokens per second of forward and backward.
        perf/forwarded_tok_s_wall_clock | tok/s | mean | Unique tokens per second of the whole step.
        perf/trained_tok_s_wall_clock | tok/s | mean | Trained tokens per second of the whole step.
        perf/mfu_fwd_bwd | % | mean | Model FLOPs utilisation during forward and backward, unique tokens, trainer devices.
        perf/mfu_wall_clock | % | mean | Model FLOPs utilisation over the whole step.
        perf/model_tflops_s | TFLOP/s | mean | Model floating-point operations per second of forward and backward.
        perf/weight_sync_s | s | sum | Pushing weights to the server.
        perf/weight_sync_pause_s | s | sum | Time the server was paused for a push.
        perf/weight_sync_barrier_s | s | sum | Waiting for the other trainer ranks at the end of the step, before a push.
        perf/weight_sync_transfer_s | s | sum | Transferring weights.
        perf/weight_sync_announce_s | s | sum | Telling the server which weights come.
        perf/weight_sync_stop_s | s | sum | Waiting until generation stands still for a push; nccl only.
        perf/weight_sync_apply_s | s | sum | Putting the sent weights in place, and clearing the prefix cache.
        perf/weight_sync_resume_s | s | sum | Letting the server go on after a push.
        perf/checkpoint_s | s | sum | Writing a checkpoint.
        perf/gpu_mem_peak_gib | GiB | max | Peak memory of a trainer GPU.
        perf/cpu_mem_peak_gib | GiB | max | Peak resident memory of the trainer process.
    """),
    *_rows("rollout", """
        rollout/concurrency | rollouts | mean | Rollouts in flight.
        rollout/concurrency_cap | rollouts | last | Live cap of rollouts in flight.
        rollout/generated_tok_s | tok/s | mean | Tokens generated per second.
        rollout/duration_s | s | mean | Duration of a rollout.
        rollout/turns_mean | turns | mean | Turns of a rollout.
        rollout/turns_max | turns | max | Most turns of a rollout.
        rollout/samples_per_rollout | | mean | Sequences a rollout was split into.
        rollout/fork_frac | | ratio | Share of turns that forked a new sequence.
        rollout/realign_frac | | ratio | Share of turns that realigned drifted tokens.
        rollout/drift_tokens_mean | tokens | mean | Tokens of re-tokenisation drift.
        rollout/drift_tokens_max | tokens | max | Largest drift.
        rollout/score_s | s | mean | Scoring a group.
        rollout/score_wait_s | s | mean | Time a finished group waited to be scored.
        rollout/score_block_s | s | sum | Time generation was held by a full score queue.
        rollout/score_queue_size | groups | mean | Groups waiting to be scored.
        rollout/dropped_groups_total | groups | sum | Groups dropped because their rewards teach nothing.
        rollout/failed_total | rollouts | sum | Rollouts that failed.
        rollout/clipped_prompts_total | rollouts | sum | Rollouts whose token limit was cut to fit the context.
        rollout/vllm_retry_total | | sum | Requests to the server that were retried.
        rollout/event_loop_lag_s | s | max | How late the rollout loop's timer fired.
    """),
    *_rows("completions", """
        completions/mean_length | tokens | mean | Generated tokens of a rollout.
        completions/min_length | tokens | min | Shortest.
        completions/max_length | tokens | max | Longest.
        completions/clipped_ratio | | ratio | Share of rollouts that ended at the token limit.
    """),
    *_rows("tools", """
        tools/call_frequency | | mean | Tool calls of a rollout.
        tools/failure_frequency | | ratio | Share of tool calls that failed.
        tools/latency_s | s | mean | Duration of a tool call.
        tools/parallel_calls_mean | | mean | Tool calls of an assistant turn that made any.
        tools/unknown_name_total | | sum | Calls of tools that do not exist.
        tools/loop_exhausted_frac | | ratio | Share of rollouts that ended at the limit of tool turns.
        tools/<name>/call_total | | sum | Calls of this tool.
        tools/<name>/failure_total | | sum | Failed calls of this tool.
        tools/<name>/latency_s | s | mean | Duration of a call of this tool.
    """),
    *_rows("environments", """
        env/reset_s | s | mean | Resetting an environment.
        env/reward_s | s | mean | Reward of an environment.
    """),
    *_rows("server", """
        vllm/kv_cache_usage | | last | Share of the KV cache in use.
        vllm/running | requests | last | Requests the server is running.
        vllm/waiting | requests | last | Requests waiting in the server.
        vllm/preemptions_total | | sum | Requests preempted for lack of KV cache, or computed anew after a weight push.
        vllm/prefix_cache_hit_frac | | last | Share of prompt tokens found in the prefix cache.
    """),
    *_rows("system", """
        system/gpu/<uuid>/util | % | mean | Utilisation of a GPU.
        system/gpu/<uuid>/mem_gib | GiB | last | Memory in use on a GPU.
        system/gpu/<uuid>/power_w | W | mean | Power of a GPU.
        system/cpu | % | mean | Processor use of the host.
        system/mem_gib | GiB | last | Memory in use on the host.
    """),
)  # fmt: skip

_BY_NAME = {metric.name: metric for metric in METRICS if "<" not in metric.name}
_PATTERNS = sorted(
    ((metric.pattern, metric) for metric in METRICS if "<" in metric.name), key=lambda item: -len(item[1].name)
)


@lru_cache(maxsize=4096)
def describe(name: str) -> Metric | None:
    """The declaration of a metric, or None for a name that is not in the table (a user's own)."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def reduce(name: str, values: Iterable[float | tuple[float, float]]) -> float:
    """One number from the values logged under `name` since the last log line.

    Names outside the table are averaged. A ratio over a zero denominator is NaN. Raises ValueError on no values.
    """
    collected = list(values)
    if not collected:
        raise ValueError(f"no values for {name}")
    metric = describe(name)
    kind = metric.reduction if metric else "mean"
    if kind == "ratio" or isinstance(collected[0], tuple):
        pairs = [value if isinstance(value, tuple) else (value, 1.0) for value in collected]
        denominator = sum(pair[1] for pair in pairs)
        return sum(pair[0] for pair in pairs) / denominator if denominator else math.nan
    numbers: list[float] = [float(value) for value in collected]  # type: ignore[arg-type]
    if kind == "sum":
        return sum(numbers)
    if kind == "max":
        return max(numbers)
    if kind == "min":
        return min(numbers)
    if kind == "last":
        return numbers[-1]
    return sum(numbers) / len(numbers)


class MetricBuffer:
    """Collects values between two log lines and reduces each by its declaration."""

    def __init__(self) -> None:
        self._values: dict[str, list[float | tuple[float, float]]] = {}

    def add(self, name: str, value: float | tuple[float, float]) -> None:
        self._values.setdefault(name, []).append(value)

    def update(self, values: Mapping[str, float | tuple[float, float]]) -> None:
        for name, value in values.items():
            self.add(name, value)

    def flush(self) -> dict[str, float]:
        """Reduced values of everything added since the last flush."""
        reduced = {name: reduce(name, values) for name, values in self._values.items()}
        self._values.clear()
        return reduced
