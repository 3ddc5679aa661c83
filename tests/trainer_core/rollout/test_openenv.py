"""OpenEnv: its client contract by a stand-in with the shapes of its clients, and a server that speaks its protocol.

test_openenv_itself.py has the package's own server and client.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from aiohttp import WSMsgType, web
from pydantic import BaseModel, Field, ValidationError
from transformers.utils import get_json_schema

from tests.trainer_core.rollout.conftest import MakeTrainer
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout.environments import environment_tools
from trainer_core.rollout.openenv import OpenEnv, connect
from trainer_core.rollout.registry import load_environment


class Guess(BaseModel):
    number: int = Field(description="From 0 to 9")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Seen(BaseModel):
    hint: str
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


@dataclass
class StepResult:
    observation: Seen
    reward: float | None = None
    done: bool = False


class Client:
    """Guessing behind OpenEnv's async client."""

    async def reset(self, **options: Any) -> StepResult:
        self.number = options.get("seed", 4)
        return StepResult(Seen(hint="from 0 to 9"))

    async def step(self, action: Guess) -> StepResult:
        found = action.number == self.number
        hint = "found" if found else "higher" if action.number < self.number else "lower"
        return StepResult(Seen(hint=hint), reward=1.0 if found else -0.1, done=found)

    async def close(self) -> None: ...


class SyncClient:
    """One whose calls are not awaited, and take their time."""

    def reset(self, **options: Any) -> StepResult:
        time.sleep(0.4)
        return StepResult(Seen(hint="sync"))

    def close(self) -> None: ...


def test_an_episode() -> None:
    async def play() -> None:
        environment = OpenEnv(Client, Guess)
        opening = await environment.reset(seed=7, prompt="p", answer="x")
        seen, _, fields = opening.partition("\n\nFields of an action: ")
        assert json.loads(seen) == {"hint": "from 0 to 9"}
        assert list(json.loads(fields)) == ["number"]
        assert environment.get_reward() is None
        act = environment_tools(environment)["act"]
        assert list(environment_tools(environment)) == ["act"]
        assert await act(action={"number": 3}) == '{"hint": "higher"}'
        assert await act(action={"number": 7}) == '{"hint": "found"} The episode is over.'
        assert await act(action={"number": 1}) == "The episode is over."
        assert environment.get_reward() == pytest.approx(0.9)
        environment._done = False
        with pytest.raises(ValueError, match="number"):
            await act(action={"numbre": 1})
        await environment.reset()
        assert environment.get_reward() is None

    asyncio.run(play())


def test_the_action_can_be_described_to_a_model() -> None:
    schema = get_json_schema(OpenEnv(Client, Guess).act)["function"]
    assert schema["name"] == "act"
    assert schema["parameters"]["properties"]["action"]["type"] == "object"


def test_a_sync_client_holds_up_nobody() -> None:
    async def play() -> None:
        environment = OpenEnv(SyncClient, Guess)
        opening = asyncio.create_task(environment.reset())
        longest, last = 0.0, time.perf_counter()
        while not opening.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        assert opening.result().startswith('{"hint": "sync"}')
        assert longest < 0.3, "the event loop stood still"
        await environment.close()

    asyncio.run(play())


class Slow(Client):
    """Hangs at the first step of the first client."""

    made: ClassVar[list[Slow]] = []
    closed = False

    def __init__(self) -> None:
        Slow.made.append(self)

    async def step(self, action: Guess) -> StepResult:
        if len(Slow.made) == 1:
            await asyncio.sleep(100)
        return await super().step(action)

    async def close(self) -> None:
        self.closed = True


def test_a_client_whose_call_was_given_up_is_not_asked_again() -> None:
    """What it still answers would be taken for the answer of the next call."""

    async def play() -> None:
        environment = OpenEnv(Slow, Guess)
        await environment.reset(seed=7)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await environment.act(action={"number": 3})
        with pytest.raises(RuntimeError, match="the episode is over: a call took too long"):
            await environment.act(action={"number": 3})
        await environment.reset(seed=7)
        assert len(Slow.made) == 2
        assert await environment.act(action={"number": 3}) == '{"hint": "higher"}'
        await environment.close()
        assert [client.closed for client in Slow.made] == [True, True]

    asyncio.run(play())


def test_a_run(make: MakeTrainer, server: StubServer, tiny_model: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    server.context = 2048
    said = ['<tool_call>{"name": "act", "arguments": {"action": {"number": %d}}}</tool_call>', "done"]

    def reply(body: dict[str, Any]) -> list[int]:
        turn = tokenizer.decode(body["prompt"]).count("assistant\n") - 1
        return tokenizer.encode(said[turn] % (len(server.requests) % 10) if turn == 0 else said[turn])

    server.reply = reply  # type: ignore[method-assign]
    trainer = make(
        rewards=[], environment_factory=functools.partial(OpenEnv, Client, Guess), max_completion_length=300,
        max_staleness=0,
    )  # fmt: skip
    trainer.run(lambda t: t.train(2))
    assert {sample.reward for sample in trainer.samples} <= {1.0, -0.1}
    assert "Fields of an action" in tokenizer.decode(trainer.samples[0].input_ids)


class Game:
    """A server of the guessing game: an environment for each WebSocket, as OpenEnv's servers have."""

    def __init__(self) -> None:
        self.sessions = self.open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Game:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/ws", self._play)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def _schema(self, _: web.Request) -> web.Response:
        return web.json_response({"action": Guess.model_json_schema(), "observation": {}, "state": {}})

    async def _play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sessions += 1
        self.open += 1
        client = Client()
        async for message in socket:
            if message.type != WSMsgType.TEXT or (asked := message.json())["type"] == "close":
                break
            try:
                if asked["type"] == "reset":
                    result = await client.reset(**asked["data"])
                else:
                    result = await client.step(Guess(**asked["data"]))
            except ValidationError:
                wrong = [{"loc": ["number"], "msg": "Field required"}]
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": wrong}
                await socket.send_json({"type": "error", "data": data})
                continue
            seen = result.observation.model_dump(exclude={"done", "reward"})
            data = {"observation": seen, "reward": result.reward, "done": result.done}
            await socket.send_json({"type": "observation", "data": data})
        self.open -= 1
        await socket.close()
        return socket


@pytest.fixture
def game() -> Iterator[Game]:
    with Game() as server:
        yield server


def test_an_episode_on_a_server(game: Game) -> None:
    async def play() -> None:
        environment, other = connect(game.url), connect(game.url)
        seen, _, fields = (await environment.reset(seed=7, prompt="p")).partition("\n\nFields of an action: ")
        await other.reset(seed=2)
        assert json.loads(seen) == {"hint": "from 0 to 9"}
        assert json.loads(fields)["number"]["description"] == "From 0 to 9"
        assert await environment.act(action={"number": 3}) == '{"hint": "higher"}'
        assert await other.act(action={"number": 3}) == '{"hint": "lower"}'
        with pytest.raises(RuntimeError, match=r"Invalid message; number: Field required \(VALIDATION_ERROR\)"):
            await environment.act(action={"numbre": 3})
        assert await environment.act(action={"number": 7}) == '{"hint": "found"} The episode is over.'
        assert environment.get_reward() == pytest.approx(0.9)
        await environment.reset(seed=1)
        assert game.sessions == 2, "an environment keeps its session"
        await environment.close()
        await other.close()
        async with asyncio.timeout(5):
            while game.open:
                await asyncio.sleep(0.01)
        await environment.reset(seed=1)
        await environment.close()

    asyncio.run(play())


def test_a_server_that_is_none_is_a_sentence() -> None:
    async def play(url: str) -> None:
        await connect(url).reset()

    with pytest.raises(ValueError, match="it must begin with http"):
        asyncio.run(play("host:1"))
    with pytest.raises(RuntimeError, match=r"the OpenEnv server at http://127\.0\.0\.1:9 cannot be reached"):
        asyncio.run(play("http://127.0.0.1:9"))


def guessing(make: MakeTrainer, server: StubServer, url: str, tiny_model: Any) -> tuple[MiniTrainer, Any]:
    """A trainer whose rollouts guess one number each in the game at `url`, and the tokenizer of its model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    server.context = 2048
    said = ['<tool_call>{"name": "act", "arguments": {"action": {"number": %d}}}</tool_call>', "done"]

    def reply(body: dict[str, Any]) -> list[int]:
        turn = tokenizer.decode(body["prompt"]).count("assistant\n") - 1
        return tokenizer.encode(said[turn] % (len(server.requests) % 10) if turn == 0 else said[turn])

    server.reply = reply  # type: ignore[method-assign]
    trainer = make(
        rewards=[], environment_factory=load_environment("openenv", {"base_url": url}), max_completion_length=300,
        max_staleness=0,
    )  # fmt: skip
    return trainer, tokenizer


def test_a_run_on_a_server(make: MakeTrainer, server: StubServer, game: Game, tiny_model: Any) -> None:
    """Rollouts side by side have a session each, kept from one rollout to the next and closed at the end."""
    trainer, _ = guessing(make, server, game.url, tiny_model)
    trainer.run(lambda t: t.train(2))
    assert {sample.reward for sample in trainer.samples} <= {1.0, -0.1}
    assert 2 <= game.sessions <= 8, "one for each rollout in flight"
    assert game.open == 0
