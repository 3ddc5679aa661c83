"""Several API servers in front of one engine: a push through one of them is a push to all."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from tests.trainer_core.sync.test_push import PROMPT, config_for, disturb, greedy, greedy_reference, load
from tests.vllm_server import running_server, tiny_spec
from trainer_core.rollout.answers import parse_metrics
from trainer_core.sync import choose_sync

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]
REQUESTS = 24
"""On a connection each; the kernel spreads them over the two processes, so that one sees none once in millions of times."""


def test_all_of_them_have_the_new_weights(tiny_model: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    spec = tiny_spec(server={"api_servers": 2})
    with running_server(spec, tiny_model, tmp_path / "server.log") as server:
        model = load(tiny_model)
        before = greedy_reference(model)
        assert [greedy(server, "policy") for _ in range(REQUESTS)] == [before] * REQUESTS
        sync = choose_sync(config=config_for(tmp_path), model=model, server_urls=[server.url])
        sync.open()
        for version in (1, 2):
            disturb(model)
            sync.push(model, version)
            after = greedy_reference(model)
            assert after != before
            assert [greedy(server, sync.model_name(version)) for _ in range(REQUESTS)] == [after] * REQUESTS
        sync.close()
        request = {"model": "policy", "prompt": PROMPT, "max_tokens": 4, "logprobs": 8}
        answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).json()
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"]) == 4
        found = parse_metrics(httpx.get(f"{server.url}/metrics", timeout=60).text)
        assert found is not None
        assert found.prefix_queries > 0
        processes = server.log.read_text().count("Started server process")
        assert processes == 2
