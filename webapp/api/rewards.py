"""Reward functions: the built-in ones, and those written in the studio."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest
from ninja import Router, Status

from trainer_core.rewards import BUILTINS
from trainer_core.rewards.sandbox import Problem as SourceProblem
from trainer_core.rewards.sandbox import function_name, score_once
from webapp.accounts.permissions import Action, require, user_of
from webapp.api.auth import get_run
from webapp.api.errors import Invalid
from webapp.api.schemas import (
    Detail,
    Id,
    Problems,
    RewardDetail,
    RewardIn,
    RewardOut,
    TestIn,
    TestOut,
    VersionIn,
    VersionOut,
)  # fmt: skip
from webapp.rewards import samples, services
from webapp.rewards.models import RewardFunction
from webapp.rewards.testing import DEADLINE_S
from webapp.runs.problems import Problem

router = Router(tags=["rewards"])
ERRORS = {401: Detail, 403: Detail, 404: Detail, 422: Problems}


@router.get("/rewards", response=list[RewardOut])
def list_(request: HttpRequest) -> list[dict[str, Any]]:
    """Built-in functions first, then those written here that are not archived."""
    own = RewardFunction.objects.filter(archived=False).prefetch_related("versions")
    return [
        *(
            {"name": name, "builtin": True, "description": item.description, "versions": []}
            for name, item in BUILTINS.items()
        ),
        *(_as_out(function) for function in own),
    ]


@router.post("/rewards/test", response={200: TestOut, **ERRORS})
def test(request: HttpRequest, body: TestIn) -> dict[str, Any]:
    """Run a source in the sandbox, on the completions given or on groups that a run stored. Nothing is kept."""
    if problems := services.problems_of(body.source):
        raise _invalid(problems)
    calls = _calls(body)
    result = score_once(body.source, function_name(body.source), calls, DEADLINE_S)
    return {
        "values": result.values, "seconds": result.seconds, "output": result.output, "level": result.level,
        "error": result.error and {
            "type": result.error.type, "message": result.error.message, "line": result.error.line,
            "traceback": result.error.traceback,
        },
    }  # fmt: skip


@router.get("/rewards/{name}", response={200: RewardDetail, 404: Detail})
def get(request: HttpRequest, name: str) -> dict[str, Any]:
    """A function written here, with its newest version."""
    return _detail(get_function(name))


@router.get("/rewards/{name}/versions/{int:number}", response={200: VersionOut, 404: Detail})
def version(request: HttpRequest, name: str, number: Id) -> Any:
    found = get_function(name).versions.select_related("created_by").filter(number=number).first()
    if found is None:
        raise Http404(f"{name} has no version {number}.")
    return found


@router.post("/rewards", response={201: RewardDetail, **ERRORS})
def create(request: HttpRequest, body: RewardIn) -> Status[Any]:
    """Store a new function as version 1. It is read first, not run; its name is that of the function in the source."""
    try:
        function = services.create_function(body.source, body.description, user_of(request))
    except services.Invalid as error:
        raise _invalid(error.problems) from error
    return Status(201, _detail(function))


@router.post("/rewards/{name}/versions", response={201: VersionOut, **ERRORS})
def create_version(request: HttpRequest, name: str, body: VersionIn) -> Status[Any]:
    """Store a further version; runs that name an older one keep it. The same source again gives the newest version back."""
    function, user = get_function(name), user_of(request)
    require(user, Action.REWARD, function)
    try:
        return Status(201, services.add_version(function, body.source, body.note, user))
    except services.Invalid as error:
        raise _invalid(error.problems) from error


def _calls(body: TestIn) -> list[dict[str, Any]]:
    if (body.run is None) == (not body.completions):
        raise Invalid("Give either 'completions', a list of texts, or 'run', whose stored rollouts are to be scored.")
    if body.run is not None:
        try:
            return [sample.arguments for sample in samples.stored(get_run(body.run), body.step)]
        except samples.NoSample as error:
            raise Invalid(str(error)) from error
    size = len(body.completions)
    return [{
        **{name: [value] * size for name, value in body.columns.items()},
        "prompts": [[{"role": "user", "content": body.prompt}]] * size,
        "completions": [[{"role": "assistant", "content": text}] for text in body.completions],
        "completion_ids": [[]] * size,
    }]  # fmt: skip


def _invalid(problems: list[SourceProblem]) -> Invalid:
    return Invalid.of([Problem(f"line {problem.line}" if problem.line else "", problem.text) for problem in problems])


def get_function(name: str) -> RewardFunction:
    """Raises Http404 with a sentence."""
    function = RewardFunction.objects.select_related("owner").filter(name=name).first()
    if function is None:
        raise Http404(f"No reward function {name!r:.100} was written here.")
    return function


def _as_out(function: RewardFunction) -> dict[str, Any]:
    numbers = sorted(version.number for version in function.versions.all())
    return {"name": function.name, "builtin": False, "description": function.description, "versions": numbers}


def _detail(function: RewardFunction) -> dict[str, Any]:
    return {**_as_out(function), "owner": function.owner.username, "newest": function.latest}
