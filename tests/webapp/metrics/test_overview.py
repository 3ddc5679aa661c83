"""Which charts a run's page begins with: those of every run, and those that its settings ask for."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from tests.webapp import seed
from trainer_core.metrics import describe
from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.metrics.overview import CHARTS, charts_of, reward_metrics

KEYS = [chart.key for chart in CHARTS]


def spec(**sections: Any) -> dict[str, Any]:
    return RunSpec.model_validate(sections).model_dump(mode="json")


def test_every_metric_of_a_chart_is_one_that_trainers_report() -> None:
    charts = charts_of(
        spec(evaluation={"every_steps": 5, "num_generations": 4}, rewards=[{"name": "a"}, {"name": "b"}])
    )
    assert len({chart.key for chart in charts}) == len(charts)
    for chart in charts:
        for metric in chart.metrics:
            assert describe(metric) is not None, metric


@pytest.mark.parametrize("given", [{}, {"rewards": [{"name": "only"}]}, {"evaluation": {"source": "x"}}])
def test_a_plain_run_has_the_charts_of_every_run(given: dict[str, Any]) -> None:
    assert [chart.key for chart in charts_of(spec(**given))] == KEYS


def test_an_evaluation_is_drawn_where_there_is_one() -> None:
    charts = {chart.key: chart for chart in charts_of(spec(evaluation={"every_steps": 5}))}
    assert charts["evaluation"].metrics == ("eval/reward", "eval/pass@1")  # pass@k would be pass@1 again
    charts = {chart.key: chart for chart in charts_of(spec(evaluation={"every_steps": 5, "num_generations": 4}))}
    assert charts["evaluation"].metrics[-1] == "eval/pass@k"


def test_each_of_several_reward_functions_has_a_line() -> None:
    two, other = spec(rewards=[{"name": "a"}, {"name": "b"}]), spec(rewards=[{"name": "b"}, {"name": "c"}])
    assert next(chart for chart in charts_of(two) if chart.key == "rewards").metrics == ("rewards/a", "rewards/b")
    assert reward_metrics([two, other, spec(rewards=[{"name": "d"}])]) == ("rewards/a", "rewards/b", "rewards/c")


def test_staleness_is_drawn_with_its_bound() -> None:
    bounds = [chart.limit for chart in charts_of(spec(rollout={"max_staleness": 3})) if chart.limit]
    assert bounds == [("max_staleness", 3)]
    assert not any(chart.limit for chart in charts_of(spec(rollout={"max_staleness": 0})))


def test_settings_of_another_version_have_charts_too() -> None:
    assert [chart.key for chart in charts_of({})] == KEYS


@pytest.mark.django_db
def test_the_page_has_them(as_ada: Client, ada: User) -> None:
    base = seed.seeded_spec()
    evaluation = base.evaluation.model_copy(update={"every_steps": 5})
    run = seed.make_run(ada, steps=1, spec=base.model_copy(update={"evaluation": evaluation}))
    page = as_ada.get(f"/runs/{run.pk}/").content.decode()
    assert 'id="chart-evaluation"' in page
    assert f"&quot;max_staleness&quot;, &quot;value&quot;: {base.rollout.max_staleness}" in page
    assert page.count("data-limit=") == 1
