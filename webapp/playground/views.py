"""Talking to the model of a live run, to two of its states side by side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal
from uuid import UUID

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_POST, require_safe
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from webapp.accounts.models import User
from webapp.accounts.permissions import Action, can, require
from webapp.playground import server
from webapp.rollouts.text import messages
from webapp.runs import page as run_page
from webapp.runs.models import Run

PROMPTS = 5
MOST_CHARACTERS = 100_000


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str


class Talk(BaseModel):
    """One question. `model` is the key of one of the server's choices."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(max_length=100)
    messages: Annotated[list[Message], Field(min_length=1, max_length=200)]
    temperature: float = Field(1.0, ge=0, le=10)
    max_tokens: int = Field(256, ge=1, le=4096)

    def request(self) -> dict[str, Any]:
        return self.model_dump(exclude={"model"})


@require_safe
def page(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)
    assert isinstance(request.user, User)
    context = {
        "run": run, "tab": "playground", "head": run_page.head(run, request.user), "live": None, "prompts": _prompts(run),
        "may_talk": can(request.user, Action.RUN, run), "rollout": run.spec.get("rollout", {}),
    }  # fmt: skip
    try:
        context["live"] = server.look(run)
    except server.NoServer as error:
        context["why_not"] = str(error)
    return render(request, "playground/page.html", context)


def _prompts(run: Run) -> list[str]:
    """What users said first in the newest prompts, to try again."""
    newest = run.rollouts.order_by("-id").values_list("data__prompt", flat=True)[: 64 * PROMPTS : 8]
    said = [message.text for prompt in newest for message in messages(prompt, "user") if message.role == "user"]
    return list(dict.fromkeys(text for text in said if text))[:PROMPTS]


@require_POST
async def talk(request: HttpRequest, run_id: UUID) -> HttpResponseBase:
    """Ask the run's server; the answer comes as JSON lines while it is made (see `server.talk`)."""
    return await sync_to_async(_answer)(request, run_id)


def _answer(request: HttpRequest, run_id: UUID) -> HttpResponseBase:
    run = get_object_or_404(Run.objects.select_related("owner"), pk=run_id)
    require(request.user, Action.RUN, run)
    if len(request.body) > 4 * MOST_CHARACTERS:
        return _refuse(f"The conversation is too long; {MOST_CHARACTERS:,} characters are allowed.")
    try:
        wanted = Talk.model_validate_json(request.body)
    except ValidationError as error:
        first = error.errors()[0]
        return _refuse(f"{'.'.join(map(str, first['loc'])) or 'The request'}: {first['msg']}.")
    try:
        live = server.look(run)
        choice = live.choice(wanted.model)
    except server.NoServer as error:
        return _refuse(str(error), 409)
    pieces: AsyncIterator[bytes] = server.talk(live, choice, wanted.request())
    return StreamingHttpResponse(
        pieces, content_type="application/x-ndjson", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


def _refuse(sentence: str, status: int = 422) -> JsonResponse:
    return JsonResponse({"failed": sentence}, status=status)
