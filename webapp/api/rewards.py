"""Reward functions: the built-in ones, and those written in the studio."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest
from ninja import Router

from trainer_core.rewards import BUILTINS
from webapp.api.schemas import Detail, Id, RewardDetail, RewardOut, VersionOut
from webapp.rewards.models import RewardFunction

router = Router(tags=["rewards"])


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


@router.get("/rewards/{name}", response={200: RewardDetail, 404: Detail})
def get(request: HttpRequest, name: str) -> dict[str, Any]:
    """A function written here, with its newest version."""
    function = get_function(name)
    return {**_as_out(function), "owner": function.owner.username, "newest": function.latest}


@router.get("/rewards/{name}/versions/{int:number}", response={200: VersionOut, 404: Detail})
def version(request: HttpRequest, name: str, number: Id) -> Any:
    found = get_function(name).versions.select_related("created_by").filter(number=number).first()
    if found is None:
        raise Http404(f"{name} has no version {number}.")
    return found


def get_function(name: str) -> RewardFunction:
    """Raises Http404 with a sentence."""
    function = RewardFunction.objects.select_related("owner").filter(name=name).first()
    if function is None:
        raise Http404(f"No reward function {name!r:.100} was written here.")
    return function


def _as_out(function: RewardFunction) -> dict[str, Any]:
    numbers = sorted(version.number for version in function.versions.all())
    return {"name": function.name, "builtin": False, "description": function.description, "versions": numbers}
