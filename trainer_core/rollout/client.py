"""The vLLM servers as the rollout side sees them: completions by token id, health, metrics.

Tokens go in and come out as ids, so nothing is re-tokenised on the way. Each rollout is a request of its own: on the CPU
server (64 rollouts of 8 prompts, SmolLM2-135M) one request with n = 8 for each prompt was no faster, 129 tokens/s against
122, and the server's prefix cache shares the prompt either way. Requests go to the least loaded server that
answers. A server that stopped answering is *lost*: requests to it raise `ServerUnavailable`, and it takes part again only
when the trainer has put the current weights back on it. The others go on meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from trainer_core.rollout.answers import (
    GenerationError,
    ServerMetrics,
    decode_answer,
    error_text,
    parse_choice,
    parse_metrics,
)
from trainer_core.rollout.sampling import EVALUATING, Sampling, SupportSource
from trainer_core.rollout.types import TurnRecord

RETRIES = 3
RETRY_WAIT_S = 0.5
HEALTH_TIMEOUT_S = 10.0
HEALTH_PERIOD_S = 1.0


class ServerUnavailable(RuntimeError):
    """The server stopped answering; what was in flight must run again once a server is ready."""


@dataclass(frozen=True)
class Policy:
    """Weights to sample from: their version, and the model name under which servers offer them."""

    version: int
    model_name: str


@dataclass
class Server:
    """One replica. `lost_at` is when it stopped answering (None while it is well), `asked_at` its newest request's time."""

    url: str
    in_flight: int = 0
    asked_at: float = 0.0
    lost_at: float | None = None
    max_model_len: int = 0
    kv_cache_tokens: int = 0
    seeds: bool = True
    support: SupportSource = "whole"
    healthy_again: bool = False


class VLLMClient:
    """Talks to one or several servers. Create it inside the event loop; `close` it there.

    An evaluation samples by `evaluation`; None: as training does. What servers tell is settled by `sampling`.

    `on_lost(url)` and `on_back(url)` are called when a server stops answering and when it answers again; `on_retry()` for
    each request that is sent again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Sampling,
        *,
        evaluation: Sampling | None = None,
        request_timeout: float,
        ready_timeout: float,
        on_lost: Callable[[str], None],
        on_back: Callable[[str], None],
        on_retry: Callable[[], None],
    ) -> None:
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.sampling = sampling
        self.evaluation = evaluation or sampling
        self.request_timeout = request_timeout
        self.ready_timeout = ready_timeout
        self.model_name = ""
        self._on_lost, self._on_back, self._on_retry = on_lost, on_back, on_retry
        self._available = asyncio.Event()
        self._failed: str | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            json_serialize=lambda value: orjson.dumps(value).decode(),
        )

    async def start(self) -> None:
        """Wait until every server is ready, and read and check its settings.

        Raises RuntimeError with one sentence when a server is not ready in time, or was started with settings that would
        make the numbers wrong.
        """
        await asyncio.gather(*(self._start_server(server) for server in self.servers))
        self._available.set()

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._session.close()

    @property
    def max_model_len(self) -> int:
        """The shortest context of the servers, in tokens."""
        return min(server.max_model_len for server in self.servers)

    @property
    def full_length_capacity(self) -> float | None:
        """Sequences of full length that fit the KV caches of all servers; None when they do not say."""
        if any(not server.kv_cache_tokens for server in self.servers):
            return None
        return sum(server.kv_cache_tokens / server.max_model_len for server in self.servers)

    async def until_available(self) -> None:
        """Return once a server may be asked. Raises RuntimeError when none comes back within `ready_timeout`."""
        await self._available.wait()
        if self._failed:
            raise RuntimeError(self._failed)

    def mark_ready(self, urls: Sequence[str]) -> None:
        """The trainer has put the current weights on these servers; those of them that came back take part again."""
        for server in self.servers:
            if server.url in urls and server.lost_at is not None and server.healthy_again:
                server.lost_at, server.healthy_again = None, False
        if any(server.lost_at is None for server in self.servers):
            self._available.set()

    def leave_out(self, urls: Sequence[str]) -> None:
        """The trainer found these servers gone, so that they lack the current weights, whether they answer here or not."""
        for server in self.servers:
            if server.url in urls:
                self._lose(server)

    async def complete(self, policy: Policy, prompt_ids: list[int], max_tokens: int) -> TurnRecord:
        """One completion. Raises GenerationError, or ServerUnavailable when the server went away meanwhile."""
        sampling = self.evaluation if EVALUATING.get() else self.sampling
        for attempt in range(RETRIES + 1):
            if attempt:
                self._on_retry()
                await asyncio.sleep(RETRY_WAIT_S * 2 ** (attempt - 1))
            server = self._least_loaded()
            seed = secrets.randbits(63) if server.seeds else None
            route, body = sampling.request(server.support, policy.model_name, prompt_ids, max_tokens, seed)
            answer = await self._post(server, route, body)
            if answer is not None:
                choice = answer["choices"][0]
                if choice.get("finish_reason") != "abort":
                    return parse_choice(choice, prompt_ids, sampling, server.support, policy.version)
        raise GenerationError(f"the server at {server.url} failed the same request {RETRIES + 1} times")

    async def poll_metrics(self) -> list[ServerMetrics]:
        """/metrics of every server that answers. Raises nothing: a server without metrics is left out."""
        ready = [server for server in self.servers if server.lost_at is None]
        found = await asyncio.gather(*(self._server_metrics(server) for server in ready))
        return [metrics for metrics in found if metrics is not None]

    def _least_loaded(self) -> Server:
        ready = [server for server in self.servers if server.lost_at is None]
        if not ready:
            raise ServerUnavailable("no vLLM server answers")
        return min(ready, key=lambda server: (server.in_flight, server.asked_at))  # of idle ones each in its turn

    async def _post(self, server: Server, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or None when asking again may help."""
        server.in_flight += 1
        server.asked_at = time.monotonic()
        try:
            async with self._session.post(
                f"{server.url}{route}",
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=self.request_timeout),
            ) as response:
                payload = await response.read()
                status = response.status
        except TimeoutError:
            raise GenerationError(
                f"the server at {server.url} did not finish a request within request_timeout ({self.request_timeout:.0f} s)"
            ) from None
        except aiohttp.ClientError as error:
            await self._check_alive(server, f"{type(error).__name__}: {error}")
            return None
        finally:
            server.in_flight -= 1
        if status == 200:
            return decode_answer(payload, server.url)
        if status >= 500 or status == 429:
            await self._check_alive(server, f"HTTP {status}")
            return None
        raise GenerationError(f"the server at {server.url} refused a request with HTTP {status}: {error_text(payload)}")

    async def _check_alive(self, server: Server, symptom: str) -> None:
        """Raises ServerUnavailable, and starts watching for its return, when the server does not answer /health."""
        if server.lost_at is None and await self._healthy(server):
            return
        if server.lost_at is None:
            self._on_lost(server.url)
            self._lose(server)
        raise ServerUnavailable(f"the server at {server.url} stopped answering ({symptom})")

    def _lose(self, server: Server) -> None:
        """Ask the server nothing, and watch for its return; unless that is so already."""
        if server.lost_at is not None and not server.healthy_again:
            return
        server.lost_at, server.healthy_again = time.monotonic(), False
        if all(other.lost_at is not None for other in self.servers):
            self._available.clear()
        watcher = asyncio.create_task(self._watch(server))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, server: Server) -> None:
        while not await self._healthy(server):
            away = [other.lost_at for other in self.servers if other.lost_at is not None and not other.healthy_again]
            if len(away) == len(self.servers) and time.monotonic() - max(away) > self.ready_timeout:
                self._failed = (
                    f"the server at {server.url} stopped answering and did not come back within "
                    f"vllm_server_timeout ({self.ready_timeout:.0f} s)"
                )
                self._available.set()
                return
            await asyncio.sleep(HEALTH_PERIOD_S)
        server.healthy_again = True
        self._on_back(server.url)

    async def _healthy(self, server: Server) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._session.get(f"{server.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _start_server(self, server: Server) -> None:
        deadline = time.monotonic() + self.ready_timeout
        while not await self._healthy(server):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the vLLM server at {server.url} was not ready within vllm_server_timeout "
                    f"({self.ready_timeout:.0f} s); is it running, and is the address right?"
                )
            await asyncio.sleep(HEALTH_PERIOD_S)
        models = await self._get_json(server, "/v1/models")
        base = next(model for model in models["data"] if model.get("parent") is None)
        server.max_model_len = int(base["max_model_len"])
        self.model_name = self.model_name or str(base["id"])
        info = await self._get_json(server, "/server_info?config_format=json", optional=True)
        if info:
            self._check_settings(server, info["vllm_config"], await self._scales_out(server))
        elif self.sampling.restricted:
            server.support = "unknown"

    def _check_settings(self, server: Server, config: dict[str, Any], scales_out: bool) -> None:
        """Read a server's configuration. Raises RuntimeError where it would make the numbers wrong."""
        model = config["model_config"]
        if (mode := model.get("logprobs_mode")) not in (None, "processed_logprobs"):
            raise RuntimeError(
                f"the server at {server.url} runs with --logprobs-mode {mode}; the ratio to the sampler needs "
                "processed_logprobs, so restart it with --logprobs-mode processed_logprobs"
            )
        mask = bool(model.get("return_sampling_mask"))
        if mask and not self.sampling.top_k:
            raise RuntimeError(
                f"the server at {server.url} runs with --return-sampling-mask and refuses requests without top_k; set top_k, "
                "or restart it without"
            )
        if mask and not scales_out:
            raise RuntimeError(
                f"the server at {server.url} runs with --return-sampling-mask and without --enable-scale-out, which opens the "
                "route that returns the mask; restart it with both"
            )
        allowed = model.get("max_logprobs", -1)
        server.support = self.sampling.source(mask=mask, max_log_probs=allowed)
        asked = self.sampling.asked_log_probs(server.support)
        if 0 <= allowed < asked:
            raise RuntimeError(
                f"the server at {server.url} allows --max-logprobs {allowed}, and num_sampler_logprobs is "
                f"{self.sampling.top_log_probs}; restart it with --max-logprobs {asked} or more"
            )
        server.kv_cache_tokens = int(config.get("cache_config", {}).get("kv_cache_size_tokens") or 0)
        device = config.get("device_config") or {}
        # On a CPU, vLLM (0.32) dies when a prompt with a seed of its own is prefilled in two steps: it rewinds the
        # generator, and the CPU's cannot be. Requests without a seed draw from the server's generator, in turn.
        server.seeds = "cpu" not in str(device.get("device_type") or device.get("device") or device)

    async def _scales_out(self, server: Server) -> bool:
        """Whether /inference/v1/generate is open; an empty request says so."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        async with self._session.post(f"{server.url}/inference/v1/generate", json={}, timeout=timeout) as response:
            return response.status in (400, 422)

    async def _get_json(self, server: Server, path: str, optional: bool = False) -> Any:
        timeout = aiohttp.ClientTimeout(total=60)
        async with self._session.get(f"{server.url}{path}", timeout=timeout) as response:
            if response.status != 200:
                if optional:
                    return None
                raise RuntimeError(f"the server at {server.url} answers {path} with HTTP {response.status}, not 200")
            return orjson.loads(await response.read())

    async def _server_metrics(self, server: Server) -> ServerMetrics | None:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._session.get(f"{server.url}/metrics", timeout=timeout) as response:
                if response.status != 200:
                    return None
                return parse_metrics(await response.text())
        except (aiohttp.ClientError, TimeoutError) as error:
            with suppress(ServerUnavailable):  # noticed, which is what matters: an idle worker sends nothing else
                await self._check_alive(server, f"{type(error).__name__}: {error}")
            return None
