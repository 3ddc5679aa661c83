"""A run's secret through the real worker and supervisor: in the trainer's environment, and in nothing that anybody reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.conftest import HOST, Studio
from tests.workers.test_lifecycle import wait_for_end

pytestmark = pytest.mark.slow
VALUE = "hf_not_a_real_token"


def test_a_trainer_that_prints_its_secret_shows_asterisks(
    studio: Studio, make_run: Callable[..., Any], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from webapp.accounts.models import User
    from webapp.runs.models import Event
    from webapp.secrets.services import store
    from workers import claiming, devices

    (studio.home / "secret_key").write_text(
        settings.SECRET_KEY
    )  # the supervisor's, so that it reads what is stored here
    monkeypatch.setattr(claiming, "SUPERVISOR_MODULE", "tests.workers.stand_ins")
    devices.register_host(HOST)
    store(User.objects.get(username="ann"), "HF_TOKEN", VALUE)
    run = make_run("secret", secrets=["HF_TOKEN"])
    claiming.claim_for(HOST)
    attempt = wait_for_end(studio, run, "failed", seconds=240)
    logs = {path.name: path.read_text() for path in attempt.folder.glob("*.log")}
    assert "'HF_TOKEN'" in logs["trainer.log"]  # the names of the environment, which it prints
    assert f"the hub refused {'*' * len(VALUE)}" in logs["trainer.log"]
    assert "the hub refused" in run.reason + repr(list(Event.objects.values()))
    assert VALUE not in run.reason + repr(logs) + repr(list(Event.objects.values()))
    assert VALUE not in (run.folder / "spec.yaml").read_text()
