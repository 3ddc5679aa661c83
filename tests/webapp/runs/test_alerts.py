"""Alerts come when they should, once, and say when they are over."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import orjson
import pytest
from django.utils import timezone

from tests.webapp import seed
from trainer_core.metrics import MetricBuffer
from webapp.accounts.models import User
from webapp.hosts.models import Device, Lease
from webapp.hosts.placement import slot_uuid
from webapp.metrics.overview import CHARTS
from webapp.metrics.store import ship_spool
from webapp.runs import alerts
from webapp.runs.alerts import Alert, check
from webapp.runs.diagnosis import WINDOW, Facts
from webapp.runs.models import Attempt, Run

CHART_KEYS = {chart.key for chart in CHARTS}


def facts(silent_s: float = 5.0, max_staleness: int = 2, **changed: Any) -> Facts:
    steady = {
        "reward": [0.5 + index % 3 / 100 for index in range(WINDOW)], "kl": 0.002,
        "perf/step_s": 10.0, "perf/rollout_wait_s": 0.1,
        "sample/staleness_max": 1, "sample/dropped_stale_total": 3, "batch/samples_per_step": 64, "frac_reward_zero_std": 0.2,
        "reward_std": 0.3, "sampling/mismatch_kl": 0.002, "loss": 0.0, "grad_norm": 0.5, "system/gpu/A/util": 80.0,
    }  # fmt: skip
    values = {**steady, **changed}
    return Facts(
        state="running", silent_s=silent_s, max_staleness=max_staleness,
        recent={name: value if isinstance(value, list) else [value] * WINDOW for name, value in values.items()},
    )  # fmt: skip


def test_a_healthy_run_raises_none() -> None:
    assert check(facts()) == []


@pytest.mark.parametrize(
    "given, rule, words",
    [
        (facts(**{"sample/staleness_max": 2}), "staleness_at_limit", "as they may be (2 updates) in 100%"),
        (facts(**{"sample/staleness_max": [1] * 12 + [2] * 8}), "staleness_at_limit", "in 80%"),
        (facts(**{"sample/dropped_stale_total": 32}), "drop_rate", "33% of the samples"),
        (facts(frac_reward_zero_std=0.9), "zero_variance", "90% of the groups"),
        (facts(reward=0.25, reward_std=0.0, frac_reward_zero_std=1.0), "all_rewards_equal", "equal (0.25)"),
        (facts(**{"sampling/mismatch_kl": [0.01] * 15 + [0.5] * 5}), "mismatch_rising", "from 0.01 to 0.5 nats"),
        (facts(**{"system/gpu/A/util": 80.0, "system/gpu/B/util": 1.0}), "gpu_idle", "does nothing: B."),
        (facts(silent_s=130.0), "stalled", "a step usually takes 10 s"),
        (facts(reward=[0.8] * 10 + [0.1] * 10), "diverging", "the reward fell"),
        (facts(kl=[0.01] * 15 + [0.6] * 5), "diverging", "KL to the sampler jumped"),
        (facts(loss=[0.0] * 18 + [math.nan] * 2), "diverging", "loss is not finite"),
    ],
)
def test_a_trouble_raises_its_alert(given: Facts, rule: str, words: str) -> None:
    (alert,) = check(given)
    assert (alert.rule, words in alert.sentence) == (rule, True), alert
    assert alert.knob
    assert alert.charts
    assert set(alert.charts) <= CHART_KEYS


def reported(steps: int, dropped: int, trained: int) -> dict[str, Any]:
    """What a trainer writes that in each step leaves out `dropped` samples and trains on `trained`."""
    buffer, lines = MetricBuffer(), []
    for _ in range(steps):
        for stale in [True] * dropped + [False] * trained:
            buffer.add("sample/dropped_stale_total", float(stale))
        buffer.add("batch/samples_per_step", trained)
        lines.append(buffer.flush())
    return {name: [line[name] for line in lines] for name in lines[0]}


@pytest.mark.parametrize(("dropped", "words"), [(40, "38% of the samples"), (16, None), (0, None)])
def test_the_drop_rate_is_that_of_the_last_steps(dropped: int, words: str | None) -> None:
    found = {alert.rule: alert.sentence for alert in check(facts(**reported(WINDOW, dropped, 64)))}
    assert set(found) == ({"drop_rate"} if words else set())
    assert words is None or words in found["drop_rate"]


def test_few_steps_raise_nothing_yet() -> None:
    young = facts(**{"sample/staleness_max": [2] * 5, "frac_reward_zero_std": [1.0] * 5})
    assert check(young) == []


def test_a_synchronous_run_has_no_staleness_alert() -> None:
    assert check(facts(max_staleness=0, **{"sample/staleness_max": 0})) == []


@pytest.fixture
def attempt(ada: User) -> Attempt:
    attempt = seed.make_run(ada, steps=0).current_attempt
    assert attempt is not None
    return attempt


def names(run: Run) -> list[str]:
    return [name for name in run.events.order_by("id").values_list("name", flat=True) if name.startswith("alert")]


@pytest.mark.django_db
def test_an_alert_is_written_once_and_again_after_it_was_over(attempt: Attempt) -> None:
    alert = Alert("stalled", "Stalled.", "resume", ("waits",))
    for raised in ([alert], [alert], [], [], [alert]):
        alerts.update(attempt, raised)
    assert names(attempt.run) == ["alert:stalled", "alert_over:stalled", "alert:stalled"]
    event = attempt.run.events.get(pk=attempt.run.events.order_by("-id").first().pk)  # type: ignore[union-attr]
    assert (event.level, event.data) == ("warning", {"knob": "resume", "charts": ["waits"]})


@pytest.mark.django_db
def test_no_step_within_five_times_the_median_raises_an_alert_from_what_the_run_reported(attempt: Attempt) -> None:
    begin = timezone.now() - timedelta(minutes=20)
    lines = b""
    for step in range(1, 16):
        at = begin.timestamp() + 30 * step
        values = f'{{"reward": 0.{step + 20}, "perf/step_s": 30, "loss": 0.0, "grad_norm": 0.4}}'
        lines += f'{{"v": 1, "kind": "metrics", "t": {at}, "step": {step}, "values": {values}}}\n'.encode()
    ship_spool(attempt, 0, lines)
    run = Run.objects.get(pk=attempt.run_id)
    alerts.look_at(run)
    assert names(run) == ["alert:stalled"]
    more = (
        f'{{"v": 1, "kind": "metrics", "t": {timezone.now().timestamp()}, "step": 16, "values": {{"reward": 0.4}}}}\n'
    )
    ship_spool(attempt, len(lines), more.encode())
    alerts.look_at(run)
    assert names(run) == ["alert:stalled", "alert_over:stalled"]


@pytest.mark.django_db
def test_only_gpus_that_the_run_holds_can_be_idle(attempt: Attempt) -> None:
    mine, _ = (
        Device.objects.create(host=seed.make_host(), uuid=f"GPU-{name}", kind="gpu", name="H200") for name in "ab"
    )
    Lease.objects.create(device=mine, attempt=attempt, purpose="both")
    begin = timezone.now().timestamp() - 150
    lines = b""
    for step in range(1, 16):
        values = {"loss": 0.0, "reward": step / 20, "system/gpu/GPU-a/util": 90, "system/gpu/GPU-b/util": 0}
        line = {"v": 1, "kind": "metrics", "t": begin + 10 * step, "step": step, "values": values}
        lines += orjson.dumps(line) + b"\n"
    ship_spool(attempt, 0, lines)
    run = Run.objects.get(pk=attempt.run_id)
    alerts.look_at(run)
    assert names(run) == []
    Device.objects.filter(pk=mine.pk).update(uuid=slot_uuid("GPU-b", 2))  # a slot of the GPU that does nothing
    alerts.look_at(run)
    assert names(run) == ["alert:gpu_idle"]
    assert "does nothing: GPU-b." in run.events.get(name="alert:gpu_idle").text


@pytest.mark.django_db
def test_an_ended_run_is_left_alone(ada: User) -> None:
    run = seed.make_run(ada, state="completed", steps=20)
    alerts.look_at(run)
    assert names(run) == []


@pytest.mark.django_db
def test_the_run_page_shows_what_is_wrong_with_the_knob_and_the_charts(as_ada: Any, attempt: Attempt) -> None:
    alerts.update(attempt, [Alert("zero_variance", "Groups teach nothing.", "data: harder", ("groups",))])
    page = as_ada.get(f"/runs/{attempt.run_id}/").content.decode()
    assert "Groups teach nothing." in page
    assert "data: harder" in page
    assert 'href="#chart-groups"' in page
    alerts.update(attempt, [])
    assert 'data-testid="alert"' not in as_ada.get(f"/runs/{attempt.run_id}/").content.decode()
