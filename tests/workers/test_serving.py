"""The server command against the real server."""

import httpx
import pytest


@pytest.mark.server
def test_the_server_starts_and_serves_the_tiny_model(tiny_server):
    models = httpx.get(f"{tiny_server.url}/v1/models", timeout=10).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("policy", 512)]
