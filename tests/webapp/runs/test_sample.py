"""The sample run starts by itself on an empty studio, and only there."""

from __future__ import annotations

import io

import pytest
from django.core.management import CommandError, call_command

from webapp.accounts.models import User
from webapp.runs.models import Run, State
from webapp.runs.sample import sample_spec

pytestmark = pytest.mark.django_db


def launch_sample() -> str:
    said = io.StringIO()
    call_command("launch_sample", stdout=said)
    return said.getvalue()


def test_it_is_launched_once(ada: User) -> None:
    assert "Launched the sample run" in launch_sample()
    run = Run.objects.get()
    assert (run.state, run.owner, run.run_spec()) == (State.QUEUED, ada, sample_spec())
    assert "not launched" in launch_sample()
    assert Run.objects.count() == 1


def test_without_an_account_it_says_what_to_do() -> None:
    with pytest.raises(CommandError, match="ensure_admin"):
        launch_sample()
