"""Alerts: what goes wrong in a live run becomes an event, once, and again an event when it is over.

`check` is a pure function of recent numbers; `look_at` reads them and writes events. Beat asks, never a page, so that an
alert comes whether or not anybody looks. Events are marks on the charts, and webhooks carry them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from django.db import transaction

from webapp.hosts.placement import gpu_of
from webapp.runs import diagnosis
from webapp.runs.lifecycle import record
from webapp.runs.models import Attempt, Event, Run, State

STEPS = 10
"""Optimizer steps that must agree before anything is said."""
AT_LIMIT = 0.8
"""Share of steps with a sample at max_staleness."""
DROPPED = 0.2
"""Share of samples dropped because they were too stale."""
ZERO_VARIANCE = 0.8
"""Share of groups whose rewards are all equal, and which teach nothing."""
IDLE_UTIL = 5.0
"""Percent below which a GPU does nothing."""
GPU = "system/gpu/"
METRICS = (
    *diagnosis.METRICS, "sample/staleness_max", "sample/dropped_stale_total", "batch/samples_per_step", "frac_reward_zero_std",
    "reward_std", "sampling/mismatch_kl",
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """`charts` are keys of webapp.metrics.overview.CHARTS; `knob` is what to turn."""

    rule: str
    sentence: str
    knob: str
    charts: tuple[str, ...]


def check(facts: diagnosis.Facts) -> list[Alert]:
    """Everything that is wrong now."""
    found = [
        _staleness(facts),
        _dropped(facts),
        _zero_variance(facts),
        _mismatch(facts),
        _idle(facts),
        _by_diagnosis(facts),
    ]
    return [alert for alert in found if alert is not None]


def look_at(run: Run) -> None:
    """Write an event for each alert of a running run that is new, and for each that is over."""
    attempt = run.current_attempt
    if attempt is None or run.state != State.RUNNING:
        return
    held = {gpu_of(uuid) for uuid in attempt.leases.values_list("device__uuid", flat=True)}
    # The trainer reports every GPU of its host; those of others, or of nobody, are none of this run's business.
    gpus = [f"{GPU}{uuid}/util" for uuid in sorted(held)]
    update(attempt, check(diagnosis.facts_of(run, (*METRICS, *gpus))))


def update(attempt: Attempt, alerts: Iterable[Alert]) -> None:
    """Compare with the alerts that are open and write what changed; asked twice, nothing is written twice."""
    now = {alert.rule: alert for alert in alerts}
    with transaction.atomic():
        run = Run.objects.select_for_update().get(pk=attempt.run_id)
        before = open_rules(attempt)
        step = run.summary.get("step")
        for rule, alert in now.items():
            if rule not in before:
                record(run, f"alert:{rule}", alert.sentence, attempt=attempt, level=Event.Level.WARNING, step=step,
                       knob=alert.knob, charts=list(alert.charts))  # fmt: skip
        for rule in before - set(now):
            record(run, f"alert_over:{rule}", f"Over: {rule.replace('_', ' ')}.", attempt=attempt, step=step)


def open_rules(attempt: Attempt) -> set[str]:
    """Rules whose newest event says that they hold."""
    return {event.name.partition(":")[2] for event in open_events(attempt)}


def open_events(attempt: Attempt | None) -> list[Event]:
    """The newest event of each alert that holds, for the run's page."""
    latest: dict[str, Event] = {}
    for event in attempt.events.filter(name__startswith="alert").order_by("id") if attempt else ():
        latest[event.name.partition(":")[2]] = event
    return [event for event in latest.values() if event.name.startswith("alert:")]


def _last(facts: diagnosis.Facts, name: str) -> list[float]:
    """The last `STEPS` finite values; empty while there are fewer."""
    values = [value for value in facts.recent.get(name, ()) if math.isfinite(value)][-STEPS:]
    return values if len(values) == STEPS else []


def _staleness(facts: diagnosis.Facts) -> Alert | None:
    oldest = _last(facts, "sample/staleness_max")
    if facts.max_staleness < 1 or not oldest:
        return None
    share = fmean(value >= facts.max_staleness for value in oldest)
    if share < AT_LIMIT:
        return None
    return Alert(
        "staleness_at_limit", f"Samples are as stale as they may be ({facts.max_staleness} updates) in {share:.0%} of the "
        "last steps; more would be dropped.", "rollout.max_concurrent_rollouts: lower; or rollout.max_staleness: higher",
        ("staleness", "queue", "concurrency"),
    )  # fmt: skip


def _dropped(facts: diagnosis.Facts) -> Alert | None:
    total, used = _last(facts, "sample/dropped_stale_total"), _last(facts, "batch/samples_per_step")
    if not total or not used:
        return None
    dropped = sum(total)  # each value counts the samples of one step only
    share = dropped / max(dropped + sum(used), 1)
    if share <= DROPPED:
        return None
    knob = "rollout.max_concurrent_rollouts: lower; or rollout.max_staleness: higher"
    text = f"{share:.0%} of the samples are dropped because they are too stale: work for nothing."
    return Alert("drop_rate", text, knob, ("staleness", "queue"))


def _zero_variance(facts: diagnosis.Facts) -> Alert | None:
    shares, spread, rewards = (_last(facts, name) for name in ("frac_reward_zero_std", "reward_std", "reward"))
    if rewards and spread and not any(spread) and len(set(rewards)) == 1:
        text = f"All rewards are equal ({rewards[-1]:.3g}) for {STEPS} steps: nothing is learned; is a reward function broken?"
        return Alert("all_rewards_equal", text, "the reward function: try it on stored rollouts", ("reward", "groups"))
    if not shares or fmean(shares) < ZERO_VARIANCE:
        return None
    text = f"{fmean(shares):.0%} of the groups have equal rewards and teach nothing: the task is too easy or too hard by now."
    return Alert(
        "zero_variance", text, "data: harder or easier prompts; rollout.num_generations: more", ("groups", "reward")
    )


def _mismatch(facts: diagnosis.Facts) -> Alert | None:
    recent = [value for value in facts.recent.get("sampling/mismatch_kl", ()) if math.isfinite(value)]
    jump = diagnosis.jumped(recent)
    if jump is None:
        return None
    text = f"Trainer and server disagree more and more: the mismatch KL went from {jump[0]:.3g} to {jump[1]:.3g} nats."
    knob = "model.dtype and server.dtype: the same; training.learning_rate: lower"
    return Alert("mismatch_rising", text, knob, ("kl", "reward"))


def _idle(facts: diagnosis.Facts) -> Alert | None:
    idle = [
        name for name in facts.recent if name.startswith(GPU) and (use := _last(facts, name)) and max(use) < IDLE_UTIL
    ]
    if not idle:
        return None
    names = ", ".join(name.removeprefix(GPU).removesuffix("/util") for name in sorted(idle))
    return Alert("gpu_idle", f"A GPU of the run does nothing: {names}.", "resources: fewer GPUs, or see which side waits",
                 ("waits", "throughput"))  # fmt: skip


def _by_diagnosis(facts: diagnosis.Facts) -> Alert | None:
    """Stalled and diverging, in the words of the run's page."""
    verdict = diagnosis.diagnose(facts)
    if verdict.verdict not in ("stalled", "diverging"):
        return None
    return Alert(verdict.verdict, verdict.sentence, verdict.knob, verdict.charts)
