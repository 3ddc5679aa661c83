"""A look into hub datasets, and at tools, while somebody fills in the form: trainer_core.peek in a short process of its own.

The web process imports no dataset library, and gives up after a while: what could not be looked at in time is no problem, since
the trainer's own checks come before the server on the run's host.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from django.core.cache import cache

from trainer_core.spec import RunSpec
from webapp.runs.commands import NOT_FOR_CHILDREN
from webapp.runs.hub import TOKENS, Access
from webapp.runs.problems import Problem

logger = logging.getLogger(__name__)
Agent = Literal["all", "builtin", "none"]
SECONDS = 20.0
REMEMBERED_S, UNREAD_S = 600, 30
"""How long an answer is kept, and one in which something could not be read."""


@dataclass(frozen=True)
class Dataset:
    """`columns` as they are stored; the first `rows` with the names of the run."""

    columns: list[str]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Peeked:
    """`unread` are sentences about what could not be looked at. `datasets` are by section: data, evaluation."""

    problems: list[Problem] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    datasets: dict[str, Dataset] = field(default_factory=dict)


def peek(spec: RunSpec, access: Access, datasets: list[str], agent: Agent) -> Peeked:
    """Look into these sections' datasets, and load tools and environment. Nothing to do takes no process."""
    if not datasets and agent == "none":
        return Peeked()
    relevant = spec.model_dump(mode="json", include={"data", "evaluation", "rewards", "agent"})
    request = json.dumps({"spec": relevant, "datasets": datasets, "agent": agent})
    key = access.key("peek", request)
    if (known := cache.get(key)) is not None:
        return known
    found = _run(request, access)
    cache.set(key, found, UNREAD_S if found.unread else REMEMBERED_S)
    return found


def _run(request: str, access: Access) -> Peeked:
    env = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN} | {"PYTHONUTF8": "1"}
    if access.token is not None:
        env |= {TOKENS[0]: access.token}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer_core.peek"], input=request, capture_output=True, text=True, timeout=SECONDS,
            check=False, env=env,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Peeked(unread=[f"It was not read within {SECONDS:.0f} s"])
    if done.returncode:
        logger.error("The look at a run's inputs ended with %s: %s", done.returncode, done.stderr[-2000:])
        lines = done.stderr.strip().splitlines() or [f"code {done.returncode}"]
        return Peeked(unread=[lines[-1]])
    # A tool's module may print something when it is imported; the answer is the last line.
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return Peeked(
        [Problem(_field(item["field"]), f"{item['message'].rstrip('.')}.") for item in answer["problems"]],
        answer["unread"],
        {name: Dataset(**found) for name, found in answer["datasets"].items()},
    )


def _field(section: str) -> str:
    """A problem of a dataset is shown at its name."""
    return f"{section}.source" if section in ("data", "evaluation") else section
