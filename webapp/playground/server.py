"""The server of a live run, or one that was started for its playground: where it is, its models, and asking it.

The address is made of the port that the run's attempt, or its playground server, has leased, so a request can't name one.
The server listens on loopback only: it is reached where the studio's web server runs on its host.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from asgiref.sync import sync_to_async

from webapp.checkpoints.models import Checkpoint
from webapp.playground import services
from webapp.playground.models import PlaygroundServer
from webapp.runs.commands import SERVED_NAME
from webapp.runs.models import ACTIVE, AttemptServer, Run, State

PORT_PURPOSE = "vLLM server"
LOOK_TIMEOUT_S = 5.0
DEADLINE_S = 120.0
"""For one answer."""
MOST_BYTES = 2_000_000
"""Of one answer."""
NOTE_USE_EVERY_S = 10.0
"""While an answer is made, so that a long one does not count as idle."""


class NoServer(Exception):
    """There is nobody to talk to; the text is a sentence."""


@dataclass(frozen=True)
class Choice:
    """A model that can be talked to. `key` is what a page sends back; `folder` is set for a checkpoint's adapter."""

    key: str
    title: str
    name: str
    folder: str = ""


@dataclass(frozen=True)
class LiveServer:
    """What a server offers now. `own` is set where it is not the run's, but was started for its playground.

    `which` says which of several servers of the run it is.
    """

    url: str
    choices: list[Choice]
    own: PlaygroundServer | None = None
    which: str = ""

    def choice(self, key: str) -> Choice:
        """Raises NoServer for a key that is none of the choices."""
        for choice in self.choices:
            if choice.key == key:
                return choice
        raise NoServer("The server does not have this model any more; reload the page.")


@dataclass(frozen=True)
class Address:
    """Where a server listens, on which host; `which` as LiveServer has it."""

    url: str
    host: str
    which: str = ""


def address(run: Run, own: PlaygroundServer | None) -> Address:
    """Of the server of the run's playground if it has one, else of the run's first that is ready. Raises NoServer."""
    if own is not None and own.answers:
        port = own.ports.filter(purpose=PORT_PURPOSE).first()
        if port is None:
            raise NoServer("The server ends just now.")
        return Address(f"http://127.0.0.1:{port.port}", own.host.name)
    if run.state not in ACTIVE:
        if own is not None and own.is_live:
            raise NoServer("The server is not ready yet.")
        what = "waits for its turn" if run.state == State.QUEUED else f"is {run.state}"
        raise NoServer(f"The run {what}, so it has no server of its own to talk to.")
    attempt = run.current_attempt
    servers = [] if attempt is None else list(attempt.servers.all())
    found = next((server for server in servers if server.state == AttemptServer.State.READY), None)
    if attempt is None or found is None:
        raise NoServer("No server of the run is ready yet; it takes a minute or so.")
    which = f"server {found.number} of the run's {len(servers)}" if len(servers) > 1 else ""
    return Address(found.url, attempt.host.name if attempt.host is not None else "its host", which)


def look(run: Run) -> LiveServer:
    """Ask the server which models it has. Raises NoServer."""
    own = services.newest(run)
    asked = address(run, own)
    try:
        answer = httpx.get(f"{asked.url}/v1/models", timeout=LOOK_TIMEOUT_S, trust_env=False)
        models = [model for model in answer.raise_for_status().json()["data"] if isinstance(model.get("id"), str)]
    except httpx.ConnectError as error:
        raise NoServer(
            f"The server does not listen on this machine; it is starting, or runs on another host ({asked.host}), where it "
            "listens for that host alone."
        ) from error
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise NoServer(f"The server does not answer as one would expect: {type(error).__name__}.") from error
    if own is not None and own.answers:
        return LiveServer(asked.url, choices_of_own(own, models), own)
    return LiveServer(asked.url, choices_of(run, models), which=asked.which)


def choices_of_own(own: PlaygroundServer, models: list[dict[str, Any]]) -> list[Choice]:
    """The checkpoint whose weights are served; or the kept adapters, the newest first, and the base model."""
    base = next((model["id"] for model in models if not model.get("parent")), SERVED_NAME)
    if own.checkpoint is not None:
        return [Choice("current", f"Checkpoint of step {own.checkpoint.step}", base)]
    return [*kept_adapters(own.run), Choice("base", "Base model", base)]


def kept_adapters(run: Run) -> list[Choice]:
    return [
        Choice(f"checkpoint-{item.pk}", f"Checkpoint of step {item.step}", f"playground-{item.pk}", str(item.folder.resolve()))
        for item in services.kept(run, Checkpoint.Kind.ADAPTER)
    ]  # fmt: skip


def choices_of(run: Run, models: list[dict[str, Any]]) -> list[Choice]:
    """The newest weights first, then older adapters and checkpoints, then the base model."""
    base = [model["id"] for model in models if not model.get("parent")]
    adapters = sorted((model["id"] for model in models if model.get("parent")), key=_version, reverse=True)
    if not base:
        return []
    takes_adapters = run.spec.get("lora", {}).get("enabled", False) and bool(adapters)
    if not takes_adapters:
        # Merged weights take the base model's place, so the server has what is trained, and only that.
        return [Choice("current", "Current weights", base[0])]
    pushed = [name for name in adapters if not name.startswith("playground-")]
    choices = [Choice(name, f"Weights of step {_version(name)}{' (newest)' if at == 0 else ''}", name)
               for at, name in enumerate(pushed)]  # fmt: skip
    return [*choices, *kept_adapters(run), Choice("base", "Base model", base[0])]


def _version(name: str) -> int:
    number = name.rpartition("-v")[2]
    return int(number) if number.isdecimal() else -1


async def talk(server: LiveServer, choice: Choice, request: dict[str, Any]) -> AsyncIterator[bytes]:
    """The answer in pieces, each a JSON line: {"text": ...} as it comes, at the end {"done": ...} or {"failed": <sentence>}."""
    timeout = httpx.Timeout(DEADLINE_S, connect=LOOK_TIMEOUT_S)
    try:
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            if choice.folder and (refusal := await _load(client, server.url, choice)):
                yield _line(failed=refusal)
                return
            body = {**request, "model": choice.name, "stream": True, "stream_options": {"include_usage": True}}
            async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    yield _line(failed=_refusal(await answer.aread(), answer.status_code))
                    return
                async for line in _pieces(answer):
                    yield line
    except httpx.TimeoutException:
        yield _line(failed=f"The server did not answer within {DEADLINE_S:.0f} s; it may be pausing for new weights.")
    except httpx.HTTPError as error:
        yield _line(failed=f"The server went away: {type(error).__name__}.")


async def noting_use(own: PlaygroundServer, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same pieces; meanwhile, and at the end, the server counts as used."""
    noted = time.monotonic()
    try:
        async for piece in pieces:
            yield piece
            if time.monotonic() - noted > NOTE_USE_EVERY_S:
                await sync_to_async(services.used)(own)
                noted = time.monotonic()
    finally:
        await sync_to_async(services.used)(own)


async def _load(client: httpx.AsyncClient, url: str, choice: Choice) -> str:
    """Have the server load a checkpoint's adapter; it is there already when the server says that it is.

    Returns why it refused, in a sentence; else nothing.
    """
    body = {"lora_name": choice.name, "lora_path": choice.folder}
    answer = await client.post(f"{url}/v1/load_lora_adapter", json=body)
    refused = answer.status_code != 200 and "already" not in answer.text
    return _refusal(answer.content, answer.status_code) if refused else ""


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Lines for the page from the server's event stream."""
    received, finish = 0, ""
    usage: dict[str, Any] = {}
    async for line in answer.aiter_lines():
        received += len(line)
        if received > MOST_BYTES:
            yield _line(failed="The answer is longer than the playground takes.")
            return
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if "error" in event:
            yield _line(failed=_refusal(data.encode(), 500))
            return
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            finish = choice.get("finish_reason") or finish
            if text := (choice.get("delta") or {}).get("content"):
                yield _line(text=text)
    yield _line(done=finish or "stop", tokens=usage.get("completion_tokens"))


def _refusal(content: bytes, status: int) -> str:
    try:
        answer = json.loads(content)
        message = str((answer.get("error") or answer).get("message") or "")
    except (ValueError, AttributeError):
        message = ""
    words = " ".join(message.split())[:300]
    return f"The server refused (HTTP {status}){': ' + words if words else ''}".rstrip(".") + "."


def _line(**record: Any) -> bytes:
    return json.dumps(record).encode() + b"\n"
