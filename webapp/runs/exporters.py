"""Whether the packages of a run's exporters are there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from trainer_core.spec import EXPORTERS, RunSpec
from webapp.runs.problems import Problem


def check_exporters(spec: RunSpec) -> list[Problem]:
    """One problem for each exporter whose package is not installed here. Nothing is imported."""
    problems = []
    for name in spec.exporters.targets:
        package = EXPORTERS[name]
        if not (_installed(package) or (name == "tensorboard" and _installed("tensorboardX"))):
            problems.append(
                Problem("exporters.targets", f"The exporter {name} needs the package {package}, which is not installed here; "
                        f"install it with {sys.executable} -m pip install {package}, or leave {name} out.")
            )  # fmt: skip
    return problems


def _installed(package: str) -> bool:
    """Whether it can be imported. A folder of that name where the process runs, as trackers leave behind, is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None
