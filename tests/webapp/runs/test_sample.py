"""The sample run starts by itself on an empty studio, and only there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from webapp.accounts.models import User
from webapp.runs import sample
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


@pytest.mark.parametrize("flags, fast", [("fpu avx2", False), ("fpu avx512f avx512_bf16", True), ("amx_bf16", True)])
def test_bfloat16_only_where_the_processor_multiplies_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, fast: bool
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    assert sample.computes_in_bf16(tmp_path / "cpuinfo") is fast
    monkeypatch.setattr(sample, "computes_in_bf16", lambda: fast)
    spec = sample.sample_spec()
    assert (spec.server.dtype, spec.training.bf16) == (("bfloat16", True) if fast else ("float32", False))
