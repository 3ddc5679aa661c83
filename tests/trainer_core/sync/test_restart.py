"""A server that is killed in mid-push: told in time, by name; after a restart everything goes on."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer_core.sync.test_push import config_for, disturb, greedy, greedy_reference, load
from tests.vllm_server import free_port
from trainer_core.report import StepReport
from trainer_core.rollout.messages import ServersReady, WeightsPushed
from trainer_core.sync import ServerUnreachable, choose_sync
from trainer_core.sync.server_api import ServerApi
from trainer_core.sync.staged import GlooSync
from trainer_core.sync.weights import ServedWeight, full_weights
from trainer_core.weights import ServerLink

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_kill_restart_reopen_push(server_to_kill):
    torch.manual_seed(4)
    server = server_to_kill
    model = load(server.model_path)
    sending = threading.Event()

    def slow_weights(model):
        """The same weights, the last of which takes two seconds to make."""
        weights = full_weights(model)

        def dawdle():
            sending.set()
            time.sleep(2)
            return weights[-1].make()

        return [*weights[:-1], ServedWeight(weights[-1].name, weights[-1].shape, dawdle)]

    sync = GlooSync([ServerApi(server.url, 20.0)], slow_weights, push_timeout_s=20.0)
    sync.open()
    disturb(model)
    killer = threading.Thread(target=lambda: (sending.wait(30), server.kill()))
    killer.start()
    start = time.monotonic()
    with pytest.raises(ServerUnreachable, match=f"127.0.0.1:{server.port}") as caught:
        sync.push(model, 1)
    assert time.monotonic() - start < 25
    assert caught.value.url == server.url
    killer.join()

    server.start_again()
    assert greedy(server, "policy") != greedy_reference(model)
    sync.reopen()
    report = sync.push(model, 1)
    assert report.total_s < 20
    assert greedy(server, "policy") == greedy_reference(model)

    server.kill()  # and is back before the next push, which then meets a server that knows of no trainer
    server.start_again()
    config: Any = SimpleNamespace(server_urls=[server.url], vllm_server_timeout=60.0)
    told: list[Any] = []
    link = ServerLink(
        config=config, sync=sync, model=model, version=lambda: 2, send=told.append, report=StepReport(torch.device("cpu")),
        event=lambda *_, **__: None,
    )  # fmt: skip
    disturb(model)
    link.push(lambda: True)
    assert greedy(server, "policy") == greedy_reference(model)
    assert told == [WeightsPushed(2, "policy"), ServersReady([server.url])]
    sync.push(load(server.model_path), 3)  # others use this server, too
    sync.close()


def test_a_server_that_is_not_there(tiny_model, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnreachable, match=f"{url} cannot be reached"):
        choose_sync(config=config_for(tmp_path), model=load(tiny_model), server_urls=[url])
    with pytest.raises(ServerUnreachable, match="not ready within 1 s"):
        ServerApi(url, 5.0).wait_until_healthy(1.0)
