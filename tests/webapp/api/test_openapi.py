"""The OpenAPI description against the application itself: every operation, with requests that fit it and that do not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import schemathesis
from django.core.wsgi import get_wsgi_application
from django.db import transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.webapp import seed
from webapp.accounts.models import ApiToken
from webapp.api.urls import api
from webapp.metrics import history
from webapp.reports.models import Report
from webapp.rewards import services
from webapp.rewards.forms import STARTER
from webapp.runs.models import State
from webapp.sweeps.models import Sweep, Trial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators"),
]

REFUSALS = ["400", "401", "403", "404", "405", "409", "413", "422"]
CONFIG = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}})
DESCRIPTION = orjson.loads(orjson.dumps(api.get_openapi_schema(), option=orjson.OPT_NON_STR_KEYS))
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION, config=CONFIG)
SCHEMA.app = get_wsgi_application()
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
EXAMPLES = 6
"""Requests for each operation and mode, besides those without a token and with a wrong one."""
SPEC = {"name": "from outside", "training": {"max_steps": 3}}
BODIES: dict[str, Any] = {
    "POST /api/runs/{run_id}/fork": [{}, {"launch": True}, {"checkpoint": 1}],
    "POST /api/runs": [{"spec": SPEC}, {"spec": SPEC, "launch": True}, {"yaml": "name: x"}, {"yaml": "- no mapping"}],
    "POST /api/spec/validate": [{"spec": SPEC}, {"spec": {"training": {"max_steps": 0}}}, {"yaml": "{"}],
    "POST /api/runs/{run_id}/sweep": [{"axes": {"training.learning_rate": [1e-4, 3e-4]}}, {"axes": {"no.such": [1]}}],
    "POST /api/imports": [{"name": "x", "source": "wandb", "started_at": "2026-01-01T00:00:00Z"}],
    "POST /api/rewards": [{"source": "def fresh(completions, **columns):\n    return [0.0] * len(completions)\n"}],
    "POST /api/rewards/{name}/versions": [{"source": STARTER.replace("my_reward", "seeded")}, {"source": "def x("}],
    "POST /api/rewards/test": [{"source": STARTER, "completions": ["4"], "columns": {"answer": "4"}}],
}
"""Bodies that mean something; what is generated from the description alone seldom does."""
NEVER_DONE_HERE = {
    "POST /api/checkpoints/{checkpoint_id}/push": "asks for a token of the hub",
    "GET /api/checkpoints/{checkpoint_id}/merged/zip": "a worker merges",
    "HEAD /api/checkpoints/{checkpoint_id}/merged/zip": "a worker merges",
}
"""Operations that can only be refused in this seed, and why."""
QUERIES = {"POST /api/runs/{run_id}/metrics": {"offset": 0}}


@dataclass
class World:
    """What is there to ask for: values of path parameters by route and name, and the header that lets one in."""

    headers: dict[str, str]
    there: dict[tuple[str, str], list[Any]]

    def places(self, label: str, parameter: str) -> list[Any]:
        found = [values for (route, name), values in self.there.items() if name == parameter and route in label]
        return found[0] if found else []


@pytest.fixture
def world(db: None, monkeypatch: pytest.MonkeyPatch, folders: Path) -> World:
    monkeypatch.setattr("webapp.runs.lifecycle.notify_queued", lambda: None)  # no broker here
    ada = seed.make_user("ada", is_superuser=True)
    _, token = ApiToken.create(ada, "fuzz")
    runs = [
        seed.make_run(ada, f"a {state} run", state=state, steps=4 if state in (State.RUNNING, State.COMPLETED) else 0)
        for state in State.values
    ]
    kept = seed.make_run(ada, "with a checkpoint", state=State.COMPLETED, steps=40, rollouts=False)
    elsewhere = history.create(
        ada, name="x", source="wandb", config={}, tags=[], started_at=None, ended_at=None, failed=False
    )
    services.create_function(STARTER.replace("my_reward", "seeded"), "seeded", ada)
    running = next(run for run in runs if run.state == State.RUNNING)
    report = Report.objects.create(title="What was learned", owner=ada, text="# Learned\n\nMuch.\n")
    sweep = Sweep.objects.create(name="rates", owner=ada, base=kept, method="grid", axes={"lora.r": [8, 16]})
    Trial.objects.create(sweep=sweep, run=running, number=1, place={"lora.r": 8})
    there: dict[tuple[str, str], list[Any]] = {
        ("/rollouts/{rollout_id}", "run_id"): [str(running.pk)],
        ("/rollouts/{rollout_id}", "rollout_id"): list(running.rollouts.values_list("pk", flat=True)[:3]),
        ("", "report_id"): [str(report.pk)],
        ("", "sweep_id"): [str(sweep.pk)],
        ("POST /api/runs/{run_id}/metrics", "run_id"): [str(elsewhere.pk)],
        ("/launch", "run_id"): [str(next(run.pk for run in runs if run.state == State.DRAFT))],
        ("/resume", "run_id"): [str(kept.pk)],
        ("/fork", "run_id"): [str(kept.pk)],
        ("/logs", "run_id"): [str(kept.pk)],
        ("", "run_id"): [str(run.pk) for run in (*runs, kept)],
        ("", "checkpoint_id"): list(kept.checkpoints.values_list("pk", flat=True)),
        ("", "attempt"): [1],
        ("", "number"): [1],
        ("/rewards", "name"): ["seeded"],
        ("/logs", "name"): ["trainer.log"],
        ("/checkpoints", "name"): ["adapter_model.safetensors", "README.md"],
    }
    return World({"Authorization": f"Bearer {token}"}, there)


def test_the_description_is_one(client: Any, db: None) -> None:
    answer = client.get("/api/openapi.json")
    assert answer.status_code == 200
    assert len(OPERATIONS) >= 50
    names = [operation.definition.raw["operationId"] for operation in OPERATIONS if operation.method != "head"]
    assert len(names) == len(set(names))
    assert json.loads(answer.content)["openapi"].startswith("3.1")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_answers_are_as_described(operation: Any, mode: GenerationMode, world: World) -> None:
    """No 5xx, no undocumented status, bodies and content types as described, and no way in without a token.

    Each request is undone, so that a deletion leaves the next one its runs.
    """
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
        pytest.skip("nothing to get wrong")

    statuses: set[int] = set()

    @settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None,
              derandomize=True)  # fmt: skip
    @given(case=operation.as_strategy(mode), data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE and data.draw(st.integers(0, 3)):
            for name in case.path_parameters or {}:
                if places := world.places(operation.label, name):
                    case.path_parameters[name] = data.draw(st.sampled_from(places))
            case.query.update(QUERIES.get(operation.label, {}))
            if bodies := BODIES.get(operation.label):
                case.body = data.draw(st.sampled_from(bodies))
        for name in [name for name in case.headers or {} if name.lower() == "host"]:
            del case.headers[name]  # another host's name is refused before any of this is reached
        with transaction.atomic():
            answer = case.call_and_validate(headers=world.headers, excluded_checks=[positive_data_acceptance])
            statuses.add(answer.status_code)
            transaction.set_rollback(True)

    ask()
    if mode is GenerationMode.POSITIVE and operation.label not in NEVER_DONE_HERE:
        assert min(statuses) < 400, f"only refusals: {sorted(statuses)}"
