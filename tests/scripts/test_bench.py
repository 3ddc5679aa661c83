"""`make bench` goes through all files of bench/, also where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import gpu_e2e


def test_without_a_gpu_the_runs_on_gpus_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_e2e, "_has_gpu", lambda: False)
    monkeypatch.setattr(gpu_e2e, "OUT", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["gpu_e2e.py"])
    assert gpu_e2e.main() == 0
    assert capsys.readouterr().out == (
        "bench/gpu_e2e.py needs a CUDA device, or --cpu and a tiny --model; there is none\n"
    )
    assert not (tmp_path / "out").exists()
