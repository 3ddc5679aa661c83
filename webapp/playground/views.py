"""Talking to the model of a run, to two of its states side by side, and starting a server for that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal
from uuid import UUID

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.views.decorators.http import require_POST, require_safe
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from webapp.accounts.models import User
from webapp.accounts.permissions import Action, can, require, user_of
from webapp.fragments import unless_seen
from webapp.playground import server, services
from webapp.playground.models import PlaygroundServer
from webapp.rollouts.text import messages as messages_of
from webapp.runs import page as run_page
from webapp.runs.lifecycle import Refused
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
    context = {
        "run": run, "tab": "playground", "head": run_page.head(run, user_of(request)), "live": None, "prompts": _prompts(run),
        "rollout": run.spec.get("rollout", {}),
    }  # fmt: skip
    try:
        context["live"] = server.look(run)
    except server.NoServer as error:
        context["why_not"] = str(error)
    about = _about_server(run, user_of(request))
    context |= {**about, "chatting": _chatting(context["live"], about["own"])}
    return render(request, "playground/page.html", context)


def _chatting(live: server.LiveServer | None, own: PlaygroundServer | None) -> str:
    """Whose server the page talks to: the run's or its own; "lost" where its own should answer and does not."""
    if live is not None:
        return "run" if live.own is None else "own"
    return "lost" if own is not None and own.answers else ""


def _about_server(run: Run, user: User) -> dict[str, Any]:
    """What the part of the page about the playground's own server shows."""
    own = services.newest(run)
    offer = None if own is not None and own.is_live else services.offer(run)
    return {
        "own": own, "offer": offer, "may_talk": can(user, Action.RUN, run),
        "idle_minutes": settings.PLAYGROUND_IDLE_S / 60,
    }  # fmt: skip


@require_safe
def status(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """The part of the page about the server, asked for again and again; the whole page once a wait without talk is over."""
    run = get_object_or_404(Run.objects.select_related("owner"), pk=run_id)
    chatting = request.GET.get("chatting", "")
    context = {"run": run, "chatting": chatting, **_about_server(run, user_of(request))}
    own = context["own"]
    waits = own is not None and own.is_live and not own.answers
    if not chatting and not waits:
        return HttpResponse(status=204, headers={"HX-Refresh": "true"})
    if own is not None and waits:
        services.used(own)  # somebody looks on
    return unless_seen(request, render_to_string("playground/server.html", context, request=request))


@require_POST
def start(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """Start a server for the run's playground."""
    run = get_object_or_404(Run.objects.select_related("owner"), pk=run_id)
    require(user_of(request), Action.RUN, run)
    wanted = request.POST.get("checkpoint", "")
    try:
        checkpoint = None
        if wanted:
            checkpoint = run.checkpoints.filter(pk=wanted).first() if wanted.isdecimal() else None
            if checkpoint is None:
                raise Refused("There is no such checkpoint of this run; choose one of the list.")
        services.start(run, user_of(request), checkpoint)
    except Refused as refusal:
        messages.error(request, str(refusal))
    return redirect("playground:page", run.pk)


@require_POST
def stop(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """Stop the playground's server."""
    run = get_object_or_404(Run.objects.select_related("owner"), pk=run_id)
    require(user_of(request), Action.RUN, run)
    own = services.newest(run)
    try:
        if own is None:
            raise Refused("The run's playground has no server.")
        services.ask_to_stop(own, user_of(request))
    except Refused as refusal:
        messages.error(request, str(refusal))
    return redirect("playground:page", run.pk)


def _prompts(run: Run) -> list[str]:
    """What users said first in the newest prompts, to try again."""
    newest = run.rollouts.order_by("-id").values_list("data__prompt", flat=True)[: 64 * PROMPTS : 8]
    said = [message.text for prompt in newest for message in messages_of(prompt, "user") if message.role == "user"]
    return list(dict.fromkeys(text for text in said if text))[:PROMPTS]


@require_POST
async def talk(request: HttpRequest, run_id: UUID) -> HttpResponseBase:
    """Ask the run's server; the answer comes as JSON lines while it is made (see `server.talk`)."""
    return await sync_to_async(_answer)(request, run_id)


def _answer(request: HttpRequest, run_id: UUID) -> HttpResponseBase:
    run = get_object_or_404(Run.objects.select_related("owner"), pk=run_id)
    require(user_of(request), Action.RUN, run)
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
    if live.own is not None:
        services.used(live.own)
        pieces = server.noting_use(live.own, pieces)
    return StreamingHttpResponse(
        pieces, content_type="application/x-ndjson", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


def _refuse(sentence: str, status: int = 422) -> JsonResponse:
    return JsonResponse({"failed": sentence}, status=status)
