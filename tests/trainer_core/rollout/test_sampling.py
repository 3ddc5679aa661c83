"""The sampler's support under top-k, top-p and min-p: how it is asked for, and that it is what the sampler drew from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aiohttp import web

from tests.trainer_core.rollout.conftest import MakeTrainer
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout import answers
from trainer_core.rollout.answers import GenerationError, parse_choice, parse_mask
from trainer_core.rollout.client import Policy, VLLMClient
from trainer_core.rollout.sampling import Sampling
from trainer_core.rollout.types import TurnRecord
from trainer_core.spec import RunSpec

if TYPE_CHECKING:
    from tests.vllm_server import RunningServer

POLICY = Policy(0, "policy")
PROMPT = [257, 84, 82, 68, 81, 198]
NARROW = Sampling(temperature=0.9, top_p=0.8, top_k=20, top_log_probs=4)


@asynccontextmanager
async def client_of(url: str, sampling: Sampling) -> AsyncIterator[VLLMClient]:
    client = VLLMClient(
        [url], sampling, request_timeout=60, ready_timeout=60,
        on_lost=lambda url: None, on_back=lambda url: None, on_retry=lambda: None,
    )  # fmt: skip
    try:
        await client.start()
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    "sampling, mask, most, source, asked",
    [
        (Sampling(top_log_probs=4), True, 20, "whole", 4),
        (NARROW, True, 20, "mask", 5),
        (Sampling(top_k=5), True, 20, "mask", 0),
        (NARROW, False, 20, "log-probs", 20),
        (NARROW, False, -1, "log-probs", 20),
        (Sampling(top_k=2, top_log_probs=4), False, 20, "log-probs", 4),
        (NARROW, False, 19, "unknown", 4),
        (Sampling(top_p=0.5, top_log_probs=4), False, -1, "unknown", 4),
        (Sampling(min_p=0.1), False, -1, "unknown", 0),
    ],
)
def test_where_the_support_comes_from(sampling: Sampling, mask: bool, most: int, source: Any, asked: int) -> None:
    assert sampling.source(mask=mask, max_log_probs=most) == source
    assert sampling.asked_log_probs(source) == asked


def test_support_among_log_probabilities() -> None:
    """The sampled token first, those cut off at -9999; the top tokens are the most likely ones of a longer list."""
    sampling = Sampling(top_k=3, top_log_probs=2)
    tops = [
        {"token_id:7": -2.0, "token_id:5": -0.2, "token_id:9": -9999.0},
        {"token_id:4": -0.1, "token_id:6": -3.0, "token_id:8": -4.0},
        {"token_id:3": -0.0, "token_id:1": -9999.0, "token_id:2": -9999.0},
    ]
    choice = {"token_ids": [7, 4, 3], "finish_reason": "stop",
              "logprobs": {"token_logprobs": [-2.0, -0.1, 0.0], "top_logprobs": tops}}  # fmt: skip
    turn = parse_choice(choice, [1], sampling, "log-probs", 0)
    assert turn.support is not None
    assert turn.support.padded(np.arange(3)).tolist() == [[7, 5, -1], [4, 6, 8], [3, -1, -1]]
    assert turn.top_ids is not None
    assert turn.top_ids.tolist() == [[5, 7], [4, 6], [3, 0]]
    assert turn.top_log_probs is not None
    np.testing.assert_allclose(turn.top_log_probs, [[-0.2, -2.0], [-0.1, -3.0], [0.0, -np.inf]])


def generated(token: int, log_prob: float, *others: tuple[int, float]) -> dict[str, Any]:
    """A position of /inference/v1/generate: the sampled token is the first of its top tokens."""
    entries = [{"token_id": name, "logprob": value, "rank": 1} for name, value in ((token, log_prob), *others)]
    return {"token_id": token, "logprob": log_prob, "rank": 1, "top_logprobs": entries}


def test_a_mask() -> None:
    content = [generated(8, -2.0, (5, -0.2), (6, -1.9)), generated(5, -0.1, (6, -3.0), (7, -4.0))]
    choice = {"token_ids": [8, 5], "finish_reason": "length", "logprobs": {"content": content},
              "sampling_mask": [[5, 6, 8], [5]]}  # fmt: skip
    turn = parse_choice(choice, [1], Sampling(top_k=3, top_log_probs=2), "mask", 4)
    assert (turn.output_log_probs, turn.finish_reason, turn.weight_version) == ([-2.0, -0.1], "length", 4)
    assert turn.top_ids is not None
    assert turn.top_ids.tolist() == [[5, 6], [5, 6]], "the sampled token counts only where it is among the most likely"
    assert turn.support is not None
    assert turn.support.padded(np.arange(2)).tolist() == [[5, 6, 8], [5, -1, -1]]
    for mask in (None, [[5, 6, 8]]):
        with pytest.raises(GenerationError, match="asked for the sampling mask of 2 tokens"):
            parse_mask(mask, 2)


class MaskServer(StubServer):
    """Returns masks where it was started for it."""

    def __init__(self, *, mask: bool, scale_out: bool, max_log_probs: int = 20) -> None:
        super().__init__()
        self.scale_out = scale_out
        self.config = {"return_sampling_mask": mask, "max_logprobs": max_log_probs}
        self.generated: list[dict[str, Any]] = []

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/inference/v1/generate", self._generate)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {"model_config": self.config}})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.scale_out:
            return web.json_response({"error": {"message": "disabled"}}, status=403)
        if "token_ids" not in body:
            return web.json_response({"error": {"message": "token_ids is missing"}}, status=400)
        self.generated.append(body)
        tokens = [len(self.generated) % 50, 3]
        choice = {"token_ids": tokens, "logprobs": {"content": [generated(token, -1.0, (60, -2.0)) for token in tokens]},
                  "finish_reason": "stop", "sampling_mask": [[token, 60] for token in tokens]}  # fmt: skip
        return web.json_response({"choices": [choice]})


@pytest.fixture
def mask_server() -> Iterator[MaskServer]:
    with MaskServer(mask=True, scale_out=True) as server:
        yield server


def test_samples_of_a_run_carry_the_mask(make: MakeTrainer, mask_server: MaskServer) -> None:
    trainer = make(
        vllm_server_base_url=mask_server.url, top_k=40, top_p=0.9, score_centering=True, num_sampler_logprobs=1
    )
    trainer.run(lambda t: t.train(1))
    assert not mask_server.requests
    parameters = mask_server.generated[0]["sampling_params"]
    assert (parameters["top_k"], parameters["top_p"], parameters["logprobs"]) == (40, 0.9, 2)
    assert [event.name for event in trainer.events] == []
    for sample in trainer.samples:
        assert sample.support is not None
        trained = np.flatnonzero(sample.completion_mask)
        assert sample.support.padded(trained).tolist() == [[sample.input_ids[t], 60] for t in trained]


def test_a_server_that_cannot_tell_gives_one_warning(make: MakeTrainer) -> None:
    trainer = make(top_p=0.9)
    trainer.run(lambda t: t.train(1))
    assert [event.name for event in trainer.events] == ["biased_ratio"]
    assert "set top_k, and start the server with --return-sampling-mask" in trainer.events[0].text
    assert all(sample.support is None for sample in trainer.samples)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options, sampling, text",
    [
        ({"mask": True, "scale_out": False}, NARROW, "without --enable-scale-out"),
        ({"mask": True, "scale_out": True}, Sampling(), "refuses requests without top_k; set top_k, or restart"),
        ({"mask": True, "scale_out": True, "max_log_probs": 4}, NARROW, "restart it with --max-logprobs 5 or more"),
    ],
)
async def test_servers_that_would_refuse_are_told_apart_at_the_start(
    options: dict[str, Any], sampling: Sampling, text: str
) -> None:
    with MaskServer(**options) as server, pytest.raises(RuntimeError, match=text):
        async with client_of(server.url, sampling):
            pass


def test_a_spec_bounds_its_support() -> None:
    for fields in ({"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match=r"rollout\.top_k is 0; the trainer normalises over the tokens"):
            RunSpec.model_validate({"rollout": fields})
        RunSpec.model_validate({"rollout": {**fields, "top_k": 64}})


def model_probabilities(folder: Path, turn: TurnRecord, temperature: float) -> np.ndarray:
    """[T, vocabulary] log-probabilities of the model at the tokens of a turn."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([turn.prompt_ids + turn.output_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).numpy()


def nucleus(row: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The smallest set of the `top_k` most likely tokens that holds `top_p` of their probability."""
    order = np.argsort(-row)[:top_k]
    share = np.exp(row[order]) / np.exp(row[order]).sum()
    return set(order[: int(np.searchsorted(np.cumsum(share), top_p)) + 1].tolist())


@pytest.mark.server
@pytest.mark.asyncio
async def test_the_real_servers_support_is_what_it_normalised_over(tiny_server: RunningServer) -> None:
    """Renormalised over the support, the model's log-probabilities are the sampler's; over all tokens they are not."""
    async with client_of(tiny_server.url, NARROW) as client:
        assert client.servers[0].support == "log-probs"
        turns = await asyncio.gather(*(client.complete(POLICY, PROMPT, 16) for _ in range(4)))
    gap = 0.0
    for turn in turns:
        whole = model_probabilities(tiny_server.model_path, turn, NARROW.temperature)
        support = turn.support
        assert support is not None
        table = support.padded(np.arange(len(turn.output_ids)))
        for row, ids, token, log_prob in zip(whole, table, turn.output_ids, turn.output_log_probs, strict=True):
            kept = ids[ids >= 0]
            assert set(kept.tolist()) == nucleus(row, NARROW.top_k, NARROW.top_p)
            assert token in kept
            assert row[token] - np.log(np.exp(row[kept]).sum()) == pytest.approx(log_prob, abs=1e-3)
            gap = max(gap, abs(row[token] - log_prob))
    assert gap > 0.1


@pytest.mark.server
@pytest.mark.asyncio
async def test_the_real_generate_route(tiny_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU server cannot return masks; all else of the route that returns them is checked with it."""
    async with client_of(tiny_server.url, NARROW) as client:
        assert client.servers[0].support == "log-probs"
        client.servers[0].support = "mask"
        with pytest.raises(GenerationError, match="asked for the sampling mask of 1 tokens and gave none"):
            await client.complete(POLICY, PROMPT, 1)
        monkeypatch.setattr(answers, "parse_mask", lambda mask, tokens: None)
        turn = await client.complete(POLICY, PROMPT, 16)
    whole = model_probabilities(tiny_server.model_path, turn, NARROW.temperature)
    assert turn.top_ids is not None
    assert turn.top_log_probs is not None
    for row, token, log_prob, ids, values in zip(
        whole, turn.output_ids, turn.output_log_probs, turn.top_ids, turn.top_log_probs, strict=True
    ):
        kept = sorted(nucleus(row, NARROW.top_k, NARROW.top_p), key=lambda token: -row[token])
        norm = np.log(np.exp(row[kept]).sum())
        assert row[token] - norm == pytest.approx(log_prob, abs=1e-3)
        best = kept[: NARROW.top_log_probs]
        present = np.isfinite(values)
        np.testing.assert_allclose(values[present], row[best] - norm, atol=1e-3)
        assert set(ids[present].tolist()) == set(best)
