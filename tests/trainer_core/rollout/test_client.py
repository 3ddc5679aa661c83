"""The client against the real server, and against one that fails in every way a server can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_core.rollout import client as client_module
from trainer_core.rollout.answers import parse_choice, parse_metrics
from trainer_core.rollout.client import (
    GenerationError,
    Policy,
    ServerUnavailable,
    VLLMClient,
)
from trainer_core.rollout.conversation import reconcile, training_arrays
from trainer_core.rollout.sampling import Sampling

if TYPE_CHECKING:
    from tests.vllm_server import RunningServer

POLICY = Policy(3, "policy")


class Faults:
    """A server whose next answers to /v1/completions are the handlers in `script`; then it answers properly."""

    def __init__(self) -> None:
        self.script: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = []
        self.bodies: list[dict[str, Any]] = []
        self.healthy = True
        self.server_config: dict[str, Any] | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/server_info", self.info)
        app.router.add_get("/metrics", cut)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "parent": None, "max_model_len": 64}]})

    async def info(self, _: web.Request) -> web.Response:
        if self.server_config is None:
            return web.Response(status=404)
        return web.json_response({"vllm_config": self.server_config})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.script:
            return await self.script.pop(0)(request)
        return web.json_response(answer())


def answer(finish: str = "stop") -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.5}]}
    return {"choices": [{"token_ids": [7], "logprobs": logprobs, "finish_reason": finish}]}


def status(code: int, text: str = "no") -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def respond(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=code)

    return respond


def payload(body: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def respond(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    return respond


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def aborted(_: web.Request) -> web.StreamResponse:
    return web.json_response(answer("abort"))


class Heard:
    """What the client reported."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.back: list[str] = []
        self.retries = 0

    def retry(self) -> None:
        self.retries += 1


@asynccontextmanager
async def faulty(
    count: int = 1, start: bool = True, **options: Any
) -> AsyncIterator[tuple[list[Faults], VLLMClient, Heard]]:
    runners, servers, urls = [], [], []
    for _ in range(count):
        server = Faults()
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")  # type: ignore[attr-defined]
        servers.append(server)
        runners.append(runner)
    heard = Heard()
    settings: dict[str, Any] = {"request_timeout": 5.0, "ready_timeout": 5.0, **options}
    sampling = settings.pop("sampling", Sampling(top_log_probs=2))
    client = VLLMClient(
        urls, sampling, on_lost=heard.lost.append, on_back=heard.back.append, on_retry=heard.retry, **settings
    )
    try:
        if start:
            await client.start()
        yield servers, client, heard
    finally:
        await client.close()
        for runner in runners:
            await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_WAIT_S", 0.01)
    monkeypatch.setattr(client_module, "HEALTH_PERIOD_S", 0.05)


@pytest.mark.asyncio
async def test_what_is_asked_and_what_comes_back() -> None:
    async with faulty(sampling=Sampling(0.7, 0.9, 20, 0.1, 1.1, top_log_probs=2)) as ([server], client, _):
        turn = await client.complete(POLICY, [1, 2], 5)
        await client.complete(POLICY, [1, 2], 5)
    assert (turn.output_ids, turn.output_log_probs, turn.finish_reason, turn.weight_version) == ([7], [-0.5], "stop", 3)
    body = server.bodies[0]
    seeds = [body.pop("seed") for body in server.bodies]
    assert seeds[0] != seeds[1]
    assert body == {
        "model": "policy", "prompt": [1, 2], "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
        "repetition_penalty": 1.1, "logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", [status(500), status(429), status(503), cut, aborted])
async def test_what_may_pass_is_tried_again(fault: Any) -> None:
    async with faulty() as ([server], client, heard):
        server.script = [fault, fault]
        assert (await client.complete(POLICY, [1], 5)).output_ids == [7]
        assert (len(server.bodies), heard.retries, heard.lost) == (3, 2, [])


@pytest.mark.asyncio
async def test_trying_again_has_an_end() -> None:
    async with faulty() as ([server], client, _):
        server.script = [status(500)] * 9
        with pytest.raises(GenerationError, match="failed the same request 4 times"):
            await client.complete(POLICY, [1], 5)
        assert len(server.bodies) == 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "fault, text",
    [
        (status(400, "too long"), "refused a request with HTTP 400: too long"),
        (status(404, "no such model"), "HTTP 404: no such model"),
        (payload(b"<html>"), "answered something that is no completion: b'<html>'"),
        (payload(b'{"choices": []}'), "no completion"),
        (payload(b'{"choices": [7]}'), "no completion"),
        (payload(b'{"choices": [{"token_ids": [7], "logprobs": [1]}]}'), "has another form than vLLM's"),
        (payload(b'{"choices": [{"finish_reason": "stop", "text": "x"}]}'), "lacks token ids"),
    ],
)
async def test_what_cannot_succeed_is_not_tried_again(fault: Any, text: str) -> None:
    async with faulty() as ([server], client, _):
        server.script = [fault]
        with pytest.raises(GenerationError, match=text):
            await client.complete(POLICY, [1], 5)
        assert len(server.bodies) == 1


@pytest.mark.asyncio
async def test_a_slow_answer_has_a_deadline() -> None:
    async with faulty(request_timeout=0.3) as ([server], client, _):
        server.script = [hang]
        started = time.monotonic()
        with pytest.raises(GenerationError, match=r"within request_timeout \(0 s\)"):
            await client.complete(POLICY, [1], 5)
        assert time.monotonic() - started < 2
        assert client.servers[0].in_flight == 0


@pytest.mark.asyncio
async def test_a_lost_server_comes_back_only_when_the_trainer_says_so() -> None:
    async with faulty() as ([server], client, heard):
        url = client.servers[0].url
        server.healthy, server.script = False, [cut, cut]
        results = await asyncio.gather(*(client.complete(POLICY, [1], 5) for _ in range(2)), return_exceptions=True)
        assert [type(result) for result in results] == [ServerUnavailable] * 2
        assert heard.lost == [url]
        with pytest.raises(ServerUnavailable, match="no vLLM server answers"):
            await client.complete(POLICY, [1], 5)
        client.mark_ready([url])  # too early: it does not answer yet
        waiting = asyncio.create_task(client.until_available())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        server.healthy = True
        await asyncio.sleep(0.3)
        assert heard.back == [url]
        assert not waiting.done(), "its weights are not the current ones yet"
        client.mark_ready(["http://another"])
        assert not waiting.done()
        client.mark_ready([url])
        await asyncio.wait_for(waiting, 1)
        assert (await client.complete(POLICY, [1], 5)).output_ids == [7]


@pytest.mark.asyncio
async def test_a_server_that_stays_away_is_a_sentence() -> None:
    async with faulty(ready_timeout=0.3) as ([server], client, _):
        server.healthy, server.script = False, [cut]
        with pytest.raises(ServerUnavailable):
            await client.complete(POLICY, [1], 5)
        with pytest.raises(RuntimeError, match=r"did not come back within vllm_server_timeout"):
            await asyncio.wait_for(client.until_available(), 3)


@pytest.mark.asyncio
async def test_a_server_that_stays_away_ends_nothing_while_another_answers() -> None:
    async with faulty(count=2, ready_timeout=1.0) as (servers, client, heard):
        first, second = (server.url for server in client.servers)
        servers[1].healthy = False
        client.leave_out([second])  # the trainer noticed first
        await asyncio.sleep(1.2)
        await asyncio.wait_for(client.until_available(), 1)
        assert (await client.complete(POLICY, [1], 5)).output_ids == [7]
        assert not servers[1].bodies
        servers[0].healthy, servers[0].script = False, [cut]
        with pytest.raises(ServerUnavailable):
            await client.complete(POLICY, [1], 5)
        await asyncio.sleep(0.1)  # the time to come back counts from the loss of the last one
        servers[1].healthy = True
        while heard.back != [second]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.1)  # the trainer takes its time
        client.mark_ready([second])
        await asyncio.wait_for(client.until_available(), 1)
        assert (await client.complete(POLICY, [1], 5)).output_ids == [7]
        assert heard.lost == [first]


@pytest.mark.asyncio
async def test_a_server_that_dies_again_before_it_has_its_weights_is_watched_again() -> None:
    async with faulty() as ([server], client, heard):
        url = client.servers[0].url
        client.leave_out([url])
        while heard.back != [url]:
            await asyncio.sleep(0.05)
        client.leave_out([url])
        client.mark_ready([url])  # not yet: nobody has seen it healthy since
        with pytest.raises(ServerUnavailable):
            await client.complete(POLICY, [1], 5)
        while heard.back != [url, url]:
            await asyncio.sleep(0.05)
        assert not server.bodies


@pytest.mark.asyncio
async def test_an_idle_worker_notices_a_lost_server_by_its_metrics() -> None:
    async with faulty() as ([server], client, heard):
        server.healthy = False
        assert await client.poll_metrics() == []
        assert heard.lost == [client.servers[0].url]


@pytest.mark.asyncio
async def test_idle_servers_take_turns() -> None:
    async with faulty(count=3) as (servers, client, _):
        for _ in range(6):
            await client.complete(POLICY, [1], 5)
        assert [len(server.bodies) for server in servers] == [2, 2, 2]


@pytest.mark.asyncio
async def test_the_least_loaded_server_is_asked_and_one_may_be_lost() -> None:
    async with faulty(count=2) as (servers, client, heard):
        servers[0].script = [hang]
        first = asyncio.create_task(client.complete(POLICY, [1], 5))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(client.complete(POLICY, [1], 5) for _ in range(3)))
        assert len(servers[1].bodies) >= 2
        servers[1].healthy, servers[1].script = False, [cut]
        client.servers[0].in_flight += 5
        with pytest.raises(ServerUnavailable):
            await client.complete(POLICY, [1], 5)
        await client.until_available()
        assert (await client.complete(POLICY, [1], 5)).output_ids == [7]
        assert len(heard.lost) == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config, text",
    [
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, "restart it with --logprobs-mode processed_logprobs"),
        (
            {"model_config": {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}},
            "restart it with --max-logprobs 2",
        ),
    ],
)
async def test_settings_that_would_spoil_the_numbers_are_refused(config: dict[str, Any], text: str) -> None:
    async with faulty(start=False) as ([server], client, _):
        server.server_config = config
        with pytest.raises(RuntimeError, match=text):
            await client.start()


@pytest.mark.asyncio
async def test_no_server_at_all_is_a_sentence() -> None:
    async with faulty(start=False, ready_timeout=0.2) as ([server], client, _):
        server.healthy = False
        with pytest.raises(RuntimeError, match="was not ready within vllm_server_timeout"):
            await client.start()


def test_the_sampled_token_is_dropped_from_the_top_only_when_it_is_extra() -> None:
    inside = {"token_id:4": -1.0, "token_id:5": -0.5, "token_id:6": -2.0}
    extra = {"token_id:9": -9.0, "token_id:4": -1.0, "token_id:5": -0.5, "token_id:6": -2.0}
    cut_off = {"token_id:4": 0.0, "token_id:5": -9999.0}
    logprobs = {"token_logprobs": [-1.0, -9.0, 0.0], "top_logprobs": [inside, extra, cut_off]}
    choice = {"token_ids": [4, 9, 4], "logprobs": logprobs, "finish_reason": "stop"}
    turn = parse_choice(choice, [1], Sampling(top_log_probs=3), "whole", 0)
    ids, log_probs = turn.top_ids, turn.top_log_probs
    assert ids is not None
    assert log_probs is not None
    assert [set(row) for row in ids.tolist()] == [{4, 5, 6}, {4, 5, 6}, {4, 0}]
    assert np.isneginf(log_probs[2, 1:]).all()
    assert log_probs[1].tolist() == [-1.0, -0.5, -2.0]


def whole_choice(source: str) -> dict[str, Any]:
    """A proper answer of three tokens, with two log-probabilities asked for."""
    ids = [4, 5, 6]
    if source == "mask":
        content = [
            {"logprob": -1.0, "top_logprobs": [{"token_id": token, "logprob": -1.0}, {"token_id": 9, "logprob": -2.0}]}
            for token in ids
        ]
        return {"token_ids": ids, "logprobs": {"content": content}, "sampling_mask": [[token, 9] for token in ids],
                "finish_reason": "stop"}  # fmt: skip
    top = [{f"token_id:{token}": -1.0, "token_id:9": -2.0} for token in ids]
    return {
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-1.0] * 3, "top_logprobs": top},
        "finish_reason": "stop",
    }


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places_in(inner, (*path, key)))]


scalars = st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(allow_nan=False) | st.text(max_size=3)
garbage = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["whole", "log-probs", "mask"]), st.data())
def test_garbage_in_an_answer_is_refused_or_harmless(source: Any, data: st.DataObject) -> None:
    """Any part of a proper answer is replaced by anything: what is taken can be trained on, the rest is a GenerationError."""
    choice = whole_choice(source)
    sampling = Sampling(top_k=0 if source == "whole" else 2, top_log_probs=2 if source != "mask" else 1)
    path = data.draw(st.sampled_from([place for place in places_in(choice) if place]))
    target = choice
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = data.draw(garbage)
    try:
        turn = parse_choice(choice, [1], sampling, source, 0)
    except GenerationError:
        return
    for sequence in reconcile([turn], 8).sequences:
        arrays = training_arrays(sequence, [turn])
        assert np.isfinite(arrays.log_probs).all()
        assert arrays.top_ids is not None
        assert len(arrays.top_ids) == len(arrays.input_ids) == len(turn.output_ids) + 1
        assert arrays.support is None or len(arrays.support.counts) == len(arrays.input_ids)


def test_metrics_text() -> None:
    text = (
        '# HELP x\nvllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\nvllm:num_preemptions_total{engine="0"} 1.0\n'
    )
    metrics = parse_metrics(text)
    assert metrics is not None
    assert (metrics.kv_usage, metrics.running, metrics.waiting, metrics.preemptions) == (0.5, 3.0, 2.0, 1.0)
    assert parse_metrics("nothing") is None


@asynccontextmanager
async def real_client(server: RunningServer, top: int) -> AsyncIterator[VLLMClient]:
    client = VLLMClient(
        [server.url], Sampling(top_log_probs=top), request_timeout=60, ready_timeout=60,
        on_lost=lambda url: None, on_back=lambda url: None, on_retry=lambda: None,
    )  # fmt: skip
    try:
        await client.start()
        yield client
    finally:
        await client.close()


@pytest.mark.server
@pytest.mark.asyncio
async def test_the_real_servers_numbers_are_the_models(tiny_server: RunningServer) -> None:
    """Log-probabilities of sampled and of top tokens equal those of the model computed here."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt = [257, 84, 82, 68, 81, 198]
    async with real_client(tiny_server, top=5) as client:
        assert client.model_name == "policy"
        assert client.max_model_len == 512
        assert client.full_length_capacity is not None
        assert client.full_length_capacity > 1
        turns = await asyncio.gather(*(client.complete(Policy(0, "policy"), prompt, 12) for _ in range(8)))
        metrics = await client.poll_metrics()
        too_long = Policy(0, "policy")
        with pytest.raises(GenerationError, match="HTTP 400"):
            await client.complete(too_long, prompt, 600)
    assert len({tuple(turn.output_ids) for turn in turns}) > 1, "completions of one prompt must differ"
    assert metrics[0].kv_usage >= 0
    model = AutoModelForCausalLM.from_pretrained(tiny_server.model_path, dtype=torch.float32).eval()
    for turn in turns:
        ids = torch.tensor([prompt + turn.output_ids])
        with torch.no_grad():
            reference = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
        sampled = reference.gather(1, ids[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(turn.output_log_probs, sampled, atol=1e-4)
        assert turn.top_ids is not None
        assert turn.top_log_probs is not None
        best = reference.topk(5)
        np.testing.assert_allclose(np.sort(turn.top_log_probs), np.sort(best.values.numpy()), atol=1e-4)
        assert [set(row) for row in turn.top_ids.tolist()] == [set(row) for row in best.indices.tolist()]


@pytest.mark.server
@pytest.mark.asyncio
async def test_a_cpu_server_is_asked_without_seeds(tiny_server: RunningServer) -> None:
    """With one, vLLM's CPU engine dies as soon as a prompt is prefilled in two pieces: more than 2048 tokens at a time."""
    async with real_client(tiny_server, top=0) as client:
        assert not client.servers[0].seeds
        prompts = [[(i * 7 + j) % 250 for j in range(400)] for i in range(16)]
        turns = await asyncio.gather(*(client.complete(Policy(0, "policy"), prompt, 4) for prompt in prompts))
        assert all(1 <= len(turn.output_ids) <= 4 for turn in turns)
    async with aiohttp.ClientSession() as session, session.get(f"{tiny_server.url}/health") as response:
        assert response.status == 200
