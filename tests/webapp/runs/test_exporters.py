"""A run that exports to a package which is not there is refused before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_core.spec import RunSpec
from webapp.runs.exporters import check_exporters


def exporting(*targets: str) -> RunSpec:
    return RunSpec.model_validate({"exporters": {"targets": list(targets)}})


def test_a_package_that_is_missing_is_named_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise AssertionError('imported')")
    (tmp_path / "trackio").mkdir()  # a folder that a tracker left behind is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("wandb", "mlflow", "trackio", "tensorboard", "tensorboardX"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert check_exporters(exporting("wandb")) == []
    for name in ("mlflow", "trackio", "tensorboard"):
        (problem,) = check_exporters(exporting("wandb", name))
        assert problem.field == "exporters.targets"
        assert problem.message == (
            f"The exporter {name} needs the package {name}, which is not installed here; install it with {sys.executable} "
            f"-m pip install {name}, or leave {name} out."
        )
    (tmp_path / "tensorboardX.py").touch()
    assert check_exporters(exporting("tensorboard")) == []
