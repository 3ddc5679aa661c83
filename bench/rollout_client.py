"""What the rollout side itself costs: from the server's answer to a training sample, on one core.

    python bench/rollout_client.py [--rollouts 600]

A stub server in a process of its own replays recorded answers of 1,000 tokens as fast as it is asked. The client asks, parses
ids, log-probabilities and the sampler's 8 best tokens, and makes the arrays of a training sample. It is pinned to one core; the
measure is rollouts a minute of that core's time (so that a loaded machine gives the same number), and by the clock beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from typing import Any

from trainer_core.rollout.client import Policy, VLLMClient
from trainer_core.rollout.conversation import reconcile, training_arrays
from trainer_core.rollout.sampling import Sampling

TOKENS, PROMPT, TOP, CONCURRENCY, ANSWERS = 1000, 200, 8, 64, 16
VOCABULARY = 49_152
WANTED_A_MINUTE = 3_000
GENERATION_SPEEDS = (1_000, 10_000)
"""Tokens a second that a server generates: a small GPU, a large one."""


def answer(top: int, rng: random.Random) -> bytes:
    """An answer of /v1/completions as vLLM 0.32 writes it, with `top` log-probabilities at each token."""
    ids = [rng.randrange(VOCABULARY) for _ in range(TOKENS)]
    log_probs = [-rng.expovariate(1.0) for _ in ids]
    best = []
    for token, log_prob in zip(ids, log_probs, strict=True):
        others = {f"token_id:{rng.randrange(VOCABULARY)}": -rng.expovariate(0.2) for _ in range(top)}
        best.append({f"token_id:{token}": log_prob, **others})
    logprobs = {
        "text_offset": [0] * TOKENS, "token_logprobs": log_probs, "tokens": [f"token_id:{token}" for token in ids],
        "top_logprobs": best if top else [{f"token_id:{t}": p} for t, p in zip(ids, log_probs, strict=True)],
    }  # fmt: skip
    choice = {
        "index": 0, "text": "x" * 4 * TOKENS, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None,
        "token_ids": ids, "prompt_token_ids": list(range(PROMPT)), "prompt_logprobs": None,
    }  # fmt: skip
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}).encode()


def serve(ready: Connection) -> None:
    """The stub: routes that the client asks for, answers made beforehand."""
    from aiohttp import web

    rng = random.Random(0)
    answers = {top: [answer(top, rng) for _ in range(ANSWERS)] for top in (0, TOP)}

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        return web.Response(body=rng.choice(answers[body["logprobs"]]), content_type="application/json")

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "parent": None, "max_model_len": 4096}]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def main() -> None:
        app = web.Application()
        app.add_routes(
            [web.get("/health", health), web.get("/v1/models", models), web.post("/v1/completions", completions)]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def ask(url: str, top: int, rollouts: int) -> tuple[float, float]:
    """Seconds of processor and clock time for so many rollouts."""
    client = VLLMClient(
        [url], Sampling(top_log_probs=top), request_timeout=60, ready_timeout=60,
        on_lost=lambda _: None, on_back=lambda _: None, on_retry=lambda: None,
    )  # fmt: skip
    await client.start()
    left = iter(range(rollouts))

    async def worker() -> None:
        for _ in left:
            turn = await client.complete(Policy(0, "m"), list(range(PROMPT)), TOKENS)
            for sequence in reconcile([turn], 1024).sequences:
                arrays = training_arrays(sequence, [turn])
                assert arrays.completion_mask.sum() == TOKENS
                assert top == 0 or arrays.top_ids is not None

    started, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    seconds, spent = time.perf_counter() - started, time.process_time() - spent
    await client.close()
    return spent, seconds


def measure(rollouts: int) -> dict[int, tuple[float, float]]:
    """Processor and clock seconds of one rollout, without and with the sampler's best tokens; the better of two."""
    context: Any = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe(duplex=False)
    stub = context.Process(target=serve, args=(theirs,), daemon=True)
    stub.start()
    everywhere = os.sched_getaffinity(0)
    try:
        if not ready.poll(60):
            raise TimeoutError("the stub server was not ready within 60 s")
        url = f"http://127.0.0.1:{ready.recv()}"
        os.sched_setaffinity(0, {min(everywhere)})
        asyncio.run(ask(url, TOP, 50))  # warm
        found = {top: min(asyncio.run(ask(url, top, rollouts)) for _ in range(2)) for top in (0, TOP)}
    finally:
        os.sched_setaffinity(0, everywhere)
        stub.kill()
        stub.join()
    return {top: (spent / rollouts, seconds / rollouts) for top, (spent, seconds) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=600)
    found = measure(parser.parse_args().rollouts)
    print(f"one core, rollouts of {TOKENS} tokens, load {os.getloadavg()[0]:.1f}")
    for top, (spent, seconds) in found.items():
        rates = f"{60 / spent:.0f} rollouts/min of its time, {60 / seconds:.0f} by the clock"
        print(f"{top} log-probabilities: {spent * 1e3:.2f} ms a rollout, {rates}")
    extra = (found[TOP][0] - found[0][0]) / TOKENS
    for speed in GENERATION_SPEEDS:
        print(f"{TOP} log-probabilities cost {extra * speed:5.1%} of a core beside a server of {speed} tokens/s")
    print(f"wanted: {WANTED_A_MINUTE} rollouts/min: {'met' if 60 / found[TOP][0] >= WANTED_A_MINUTE else 'NOT met'}")


if __name__ == "__main__":
    main()
