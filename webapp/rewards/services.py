"""Storing reward functions: checked first, never changed afterwards."""

from __future__ import annotations

import keyword
from dataclasses import dataclass

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.db.models.fields.json import KT

from trainer_core.rewards import BUILTINS
from trainer_core.rewards.sandbox import Problem, function_name, validate_source
from webapp.accounts.models import User
from webapp.audit import log
from webapp.rewards.models import RewardFunction, RewardVersion
from webapp.runs.models import Run

MAX_SOURCE = 200_000
"""Characters of a reward function."""
RESERVED = ("new", "validate", "test")
"""Words that are pages of their own under /rewards/."""


class Invalid(ValueError):
    """A source that can't be stored; `problems` say why, by line."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems


def problems_of(source: str) -> list[Problem]:
    """What is wrong with a source, without running it; includes names that can't be used here."""
    if len(source) > MAX_SOURCE:
        return [Problem(1, f"The source has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed.")]
    if problems := validate_source(source):
        return problems
    name = function_name(source)
    if name in BUILTINS or name in RESERVED or keyword.issoftkeyword(name):
        what = "is the name of a built-in reward" if name in BUILTINS else "is reserved"
        return [Problem(_line_of(source, name), f"{name} {what}; give the function another name.")]
    if len(name) > 80:
        return [Problem(_line_of(source, name), "The function's name is longer than 80 characters.")]
    return []


def create_function(source: str, description: str, owner: User) -> RewardFunction:
    """Store a new function, named as in its source, as version 1. Raises Invalid."""
    _check(source)
    name = function_name(source)
    taken = Problem(_line_of(source, name), f"There is a reward {name} already; store this as a version of it, or "
                          "rename the function.")  # fmt: skip
    try:
        with transaction.atomic():
            function = RewardFunction.objects.create(name=name, description=description, owner=owner)
            version = RewardVersion.objects.create(function=function, number=1, source=source, created_by=owner)
            _note(version, owner)
    except IntegrityError as error:
        raise Invalid([taken]) from error
    return function


def add_version(function: RewardFunction, source: str, note: str, author: User) -> RewardVersion:
    """Store a further version. The newest one is given back when the source is the same. Raises Invalid."""
    _check(source)
    name = function_name(source)
    if name != function.name:
        message = f"The function is called {name} here, but this reward is {function.name}; keep the name."
        raise Invalid([Problem(_line_of(source, name), message)])
    with transaction.atomic():
        locked = RewardFunction.objects.select_for_update().get(pk=function.pk)
        newest = locked.latest
        if newest is not None and newest.source == source:
            return newest
        number = newest.number + 1 if newest else 1
        version = RewardVersion.objects.create(
            function=locked, number=number, source=source, note=note, created_by=author
        )
        _note(version, author)
        return version


def _note(version: RewardVersion, author: User) -> None:
    text = f"Version {version.number} saved, sha256 {version.sha256}."
    log.record(author, "reward.saved", text, version.function)


def runs_using(function: RewardFunction) -> QuerySet[Run]:
    """Runs whose spec names this function, newest first."""
    # The JSON text of the rewards list; a quoted name can only be the value of "name".
    return (
        Run.objects.annotate(rewards_text=KT("spec__rewards"))
        .filter(rewards_text__contains=f'"{function.name}"')
        .order_by("-created_at")
    )


def _check(source: str) -> None:
    if problems := problems_of(source):
        raise Invalid(problems)


def _line_of(source: str, name: str) -> int:
    lines = source.splitlines()
    return next((number for number, line in enumerate(lines, 1) if f"def {name}" in line), 1)


@dataclass(frozen=True)
class Usage:
    """A run that uses a function, and which version of it."""

    run: Run
    version: int | None


def usages(function: RewardFunction, limit: int = 20) -> list[Usage]:
    found = []
    for run in runs_using(function)[:limit]:
        version = next((item.get("version") for item in run.spec["rewards"] if item["name"] == function.name), None)
        found.append(Usage(run, version))
    return found
