"""A server that is killed in mid-push: told in time, by name; after a restart everything goes on."""

import contextlib
import threading
import time

import pytest
import torch

from tests.trainer_core.sync.test_push import config_for, disturb, greedy, greedy_reference, load
from tests.vllm_server import free_port, running_server, tiny_spec
from trainer_core.sync import ServerUnreachable, choose_sync
from trainer_core.sync.gloo import GlooSync
from trainer_core.sync.server_api import ServerApi
from trainer_core.sync.weights import ServedWeight, full_weights

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_kill_restart_reopen_push(tiny_model, tmp_path):
    torch.manual_seed(4)
    port = free_port()
    model = load(tiny_model)
    sending = threading.Event()

    def slow_weights(model):
        """The same weights, the last of which takes two seconds to make."""
        weights = full_weights(model)

        def dawdle():
            sending.set()
            time.sleep(2)
            return weights[-1].make()

        return [*weights[:-1], ServedWeight(weights[-1].name, weights[-1].shape, dawdle)]

    with contextlib.ExitStack() as servers:
        server = servers.enter_context(running_server(tiny_spec(), tiny_model, tmp_path / "first.log", port))
        sync = GlooSync([ServerApi(server.url, 20.0)], slow_weights, push_timeout_s=20.0)
        sync.open()
        disturb(model)
        killer = threading.Thread(target=lambda: (sending.wait(30), server.kill()))
        killer.start()
        start = time.monotonic()
        with pytest.raises(ServerUnreachable, match=f"127.0.0.1:{port}") as caught:
            sync.push(model, 1)
        assert time.monotonic() - start < 25
        assert caught.value.url == server.url
        killer.join()

        again = servers.enter_context(running_server(tiny_spec(), tiny_model, tmp_path / "second.log", port))
        assert greedy(again, "policy") != greedy_reference(model)
        sync.reopen()
        report = sync.push(model, 1)
        assert report.total_s < 20
        assert greedy(again, "policy") == greedy_reference(model)
        sync.close()


def test_a_server_that_is_not_there(tiny_model, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnreachable, match=f"{url} cannot be reached"):
        choose_sync(config=config_for(tmp_path), model=load(tiny_model), server_urls=[url])
    with pytest.raises(ServerUnreachable, match="not ready within 1 s"):
        ServerApi(url, 5.0).wait_until_healthy(1.0)
