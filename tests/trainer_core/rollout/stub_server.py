"""A fault injector with vLLM's routes: random tokens at once, or after a delay, or not at all."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web


class StubServer:
    """Runs in a thread. `delay_s` slows completions down, `down` cuts every connection, `requests` counts completions.

    `reply` maps a request body to token ids; by default 1 to 6 random ones below 200. `fault` may answer a completion in its
    own way, or return None; `answered` counts proper answers.
    """

    def __init__(self, context: int = 256) -> None:
        self.context = context
        self.delay_s = 0.0
        self.down = False
        self.requests: list[dict[str, Any]] = []
        self.refuse = 0
        self.fault: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None
        self.answered = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> StubServer:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def reply(self, body: dict[str, Any]) -> list[int]:
        return [random.randrange(200) for _ in range(random.randint(1, min(6, body["max_tokens"])))]

    def routes(self, app: web.Application) -> None:
        """More routes, of a subclass."""

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        self.routes(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    def _cut_when_down(self, request: web.Request) -> None:
        if self.down:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError

    async def _health(self, request: web.Request) -> web.Response:
        self._cut_when_down(request)
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "parent": None, "max_model_len": self.context}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._cut_when_down(request)
        return web.Response(text='vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:num_preemptions_total{engine="0"} 0\n')

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self._cut_when_down(request)
        body = await request.json()
        self.requests.append(body)
        if self.refuse:
            self.refuse -= 1
            return web.json_response({"error": {"message": "no"}}, status=400)
        if self.fault is not None and (response := await self.fault(request)) is not None:
            return response
        await asyncio.sleep(self.delay_s * random.uniform(0.5, 1.5))
        self._cut_when_down(request)
        ids = self.reply(body)
        log_probs = [-1.0 - 0.01 * index for index in range(len(ids))]
        top = [{f"token_id:{token}": value} for token, value in zip(ids, log_probs, strict=True)]
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": log_probs, "top_logprobs": top},
            "finish_reason": "length" if len(ids) == body["max_tokens"] else "stop",
        }
        self.answered += 1
        return web.json_response({"choices": [choice]})
