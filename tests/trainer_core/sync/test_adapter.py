"""LoRA pushed as adapters to a server that was started for it, and what is refused before that."""

import asyncio
from collections import Counter
from uuid import uuid4

import httpx
import pytest
import torch
from aiohttp import web
from peft import LoraConfig, get_peft_model

from tests.tiny_model import tiny_qwen3
from tests.trainer_core.rollout.conftest import prompts
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from tests.trainer_core.rollout.mini_trainer import config_for as loop_config
from tests.trainer_core.rollout.stub_server import StubServer
from tests.trainer_core.sync.test_push import PROMPT, config_for, disturb, greedy, greedy_reference, load
from tests.vllm_server import running_server, tiny_spec
from trainer_core import AsyncRolloutLoop, Rollout
from trainer_core.sync import ServerUnreachable, WeightSyncError, choose_sync
from trainer_core.sync.adapter import AdapterSync, check_limits, obstacles
from trainer_core.sync.server_api import LoraLimits, ServerInfo
from trainer_core.sync.staged import GlooSync
from webapp.runs import commands


def lora_model(**settings):
    config = LoraConfig(
        **{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings
    )
    return get_peft_model(load(tiny_qwen3()), config)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"use_dora": True}, ["use_dora"]),
        ({"bias": "all"}, ["bias=all"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["an adapted output head"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights=pissa"]),
        ({"init_lora_weights": "olora"}, ["init_lora_weights=olora"]),
        ({"init_lora_weights": "mica"}, ["init_lora_weights=mica"]),
        ({"init_lora_weights": "gaussian"}, []),
        ({"init_lora_weights": "orthogonal"}, []),
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"k_proj": 2}}, []),
    ],
    ids=str,
)
def test_what_a_server_cannot_load_as_an_adapter(settings, found):
    assert obstacles(lora_model(**settings), "0.32.0") == found


def test_older_servers_take_one_rank_and_one_scale_for_all_layers():
    model = lora_model(rank_pattern={"q_proj": 4}, alpha_pattern={"k_proj": 2})
    assert obstacles(model, "0.26.0") == ["rank_pattern", "alpha_pattern"]


@pytest.mark.parametrize(
    ("limits", "rank", "sentence"),
    [
        (LoraLimits(4, 16), 16, None),
        (LoraLimits(3, 16), 16, "restart it with --max-loras 4"),
        (LoraLimits(4, 16), 17, "restart it with --max-lora-rank 32"),
        (LoraLimits(4, 512), 513, "at most 512"),
    ],
)
def test_a_server_started_too_small_is_told_the_value_to_restart_with(limits, rank, sentence):
    info = ServerInfo("0.32.0", "policy", "float32", 512, 1, "gloo", limits)
    if sentence is None:
        check_limits(info, "http://a", rank, max_staleness=2)
    else:
        with pytest.raises(WeightSyncError, match=sentence):
            check_limits(info, "http://a", rank, max_staleness=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of adapters with room for three. Every test has names of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "uses_adapter_sync", lambda spec, device: True)
        spec = tiny_spec(lora={"enabled": True, "r": 8}, rollout={"max_staleness": 1})
        with running_server(spec, tiny_qwen3(), tmp_path_factory.mktemp("adapters") / "server.log") as running:
            yield running


def opened(model, server, tmp_path, **settings):
    sync = choose_sync(config=config_for(tmp_path, **settings), model=model, server_urls=[server.url])
    assert isinstance(sync, AdapterSync)
    sync.open()
    return sync


def offered(server):
    return {entry["id"] for entry in httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"]}


@pytest.mark.server
@pytest.mark.slow
def test_adapters_against_a_server_with_lora(server, tmp_path):
    torch.manual_seed(5)
    model = lora_model()
    sync = opened(model, server, tmp_path, max_staleness=1, run_name="my run/1")
    assert sync.model_name(0) == "policy"
    outputs = {}
    for version in (1, 2, 3, 4):
        disturb(model, 0.2)
        report = sync.push(model, version)
        assert report.pause_s == 0
        outputs[version] = greedy(server, sync.model_name(version))
        assert outputs[version] == greedy_reference(model)
    # Older versions that are kept still answer as they did; the one that was too old at the push before is gone.
    assert greedy(server, sync.model_name(3)) == outputs[3] != outputs[4]
    assert offered(server) == {"policy", "my-run-1-v2", "my-run-1-v3", "my-run-1-v4"}
    assert {path.name for path in (tmp_path / ".vllm_lora").iterdir()} == offered(server) - {"policy"}

    for version in (3, 4):  # what a restart forgets
        httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": f"my-run-1-v{version}"}, timeout=10)
    assert sync.reopen() == []
    sync.push(model, 4)
    assert greedy(server, sync.model_name(4)) == outputs[4]
    assert greedy(server, sync.model_name(3)) == outputs[3]
    sync.close()

    # The same server takes merged weights of what it could not load.
    dora = lora_model(use_dora=True)
    config = config_for(tmp_path)
    merged = choose_sync(config=config, model=dora, server_urls=[server.url])
    assert isinstance(merged, GlooSync)
    merged.open()
    disturb(dora, 0.05)
    merged.push(dora, 1)
    assert greedy(server, merged.model_name(1)) == greedy_reference(dora)
    start = lora_model()
    merged.push(start, 2)  # the other tests' base
    assert greedy(server, merged.model_name(2)) == greedy_reference(start)
    merged.close()

    with pytest.raises(WeightSyncError, match="restart it with --max-loras 9"):
        choose_sync(config=config_for(tmp_path, max_staleness=7), model=model, server_urls=[server.url])


@pytest.mark.server
@pytest.mark.slow
def test_an_adapter_is_read_once_not_at_every_token(server, tmp_path):
    torch.manual_seed(6)
    model = lora_model()
    disturb(model, 0.2)
    sync = opened(model, server, tmp_path, run_name="once", max_staleness=1)
    sync.push(model, 1)
    request = {"model": "once-v1", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        (tmp_path / ".vllm_lora" / "once-v1").rename(tmp_path / "gone")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 200
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    (tmp_path / "gone").rename(tmp_path / ".vllm_lora" / "once-v1")
    sync.close()


@pytest.mark.server
@pytest.mark.slow
def test_a_name_that_the_server_knows_from_an_earlier_trainer_gets_the_new_weights(server, tmp_path):
    torch.manual_seed(7)
    prompt = [257, *range(65, 165)]  # some whole blocks for the prefix cache
    outputs = []
    for _ in range(2):
        model = lora_model()
        disturb(model, 0.3)
        sync = opened(model, server, tmp_path, run_name="again", max_staleness=1)
        sync.push(model, 1)
        outputs.append(greedy(server, "again-v1", prompt=prompt))
        assert outputs[-1] == greedy_reference(model, prompt=prompt)
        sync.close()
    assert outputs[0] != outputs[1]


class ManyTurns(AsyncRolloutLoop):
    """Rollouts of so many short turns that they outlast two pushes."""

    async def generate_one(self, row_index, row, epoch):
        policy, ids, turns = self.policy, list(PROMPT), []
        for _ in range(200):
            turns.append(await self.client.complete(policy, ids, 2))
            ids = [*ids, *turns[-1].output_ids]
            await asyncio.sleep(0.02)
        return Rollout(uuid4().hex, [], [], turns)


def zero(completion_ids, **columns):
    return [0.0] * len(completion_ids)


@pytest.mark.server
@pytest.mark.slow
def test_rollouts_that_became_too_old_do_not_lose_their_adapter_under_way(server, tmp_path):
    torch.manual_seed(8)
    model = lora_model()
    sync = opened(model, server, tmp_path, run_name="old", max_staleness=0)
    config = loop_config(server.url, tmp_path, max_staleness=0, max_generation_failures=1)
    trainer = MiniTrainer(config, prompts(20), [zero], tiny_qwen3(), loop_cls=ManyTurns, model_name="old-v{version}")

    async def body(trainer):
        for version in (1, 2, 3, 4):
            disturb(model, 0.1)
            await asyncio.to_thread(sync.push, model, version)
            await asyncio.sleep(0.3)  # the news take their time
            trainer.push(version)
            await asyncio.sleep(0.5)
            assert trainer.loop.slots.in_flight > 0
        await asyncio.sleep(1.2)

    trainer.run(body)
    values = trainer.metrics.flush()
    assert values.get("rollout/failed_total", 0) == 0
    assert {message.reason for message in trainer.dropped} == {"stale"}
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    assert {name for name in offered(server) if name.startswith("old-")} == {"old-v3", "old-v4"}
    sync.close()


class Registry(StubServer):
    """A server as far as adapters go: it remembers their names, and how often each was loaded."""

    def __init__(self):
        super().__init__()
        self.loaded = Counter()
        self.names = set()

    def routes(self, app):
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/version", self.version)
        app.router.add_get("/get_world_size", self.world_size)
        app.router.add_post("/v1/load_lora_adapter", self.load)
        app.router.add_post("/v1/unload_lora_adapter", self.unload)
        app.router.add_post("/reset_prefix_cache", self.version)

    async def server_info(self, _):
        lora = {"max_loras": 3, "max_lora_rank": 8}
        return web.json_response({"vllm_config": {
            "lora_config": lora, "weight_transfer_config": None, "model_config": {"dtype": "float32", "max_model_len": 64}
        }})  # fmt: skip

    async def version(self, _):
        return web.json_response({"version": "0.32.0"})

    async def world_size(self, _):
        return web.json_response({"world_size": 1})

    async def _models(self, _):
        names = [{"id": "policy", "max_model_len": 64}, *({"id": name, "parent": "policy"} for name in self.names)]
        return web.json_response({"data": names})

    async def load(self, request):
        self._cut_when_down(request)
        name = (await request.json())["lora_name"]
        if name in self.names:
            return web.json_response({"error": {"message": "already loaded"}}, status=400)
        self.loaded[name] += 1
        self.names.add(name)
        return web.Response()

    async def unload(self, request):
        self._cut_when_down(request)
        name = (await request.json())["lora_name"]
        if name not in self.names:
            return web.json_response({"error": {"message": "cannot be found"}}, status=404)
        self.names.discard(name)
        return web.Response()


def test_one_of_two_servers_is_lost_and_comes_back(tmp_path):
    model = lora_model()
    with Registry() as first, Registry() as second:
        sync = choose_sync(
            config=config_for(tmp_path, max_staleness=1), model=model, server_urls=[first.url, second.url]
        )
        sync.open()
        sync.push(model, 1)
        second.down = True
        with pytest.raises(ServerUnreachable) as caught:
            sync.push(model, 2)
        assert caught.value.url == second.url
        assert sync.reopen() == [second.url]
        sync.push(model, 2)
        sync.push(model, 3)
        assert {name[-2:] for name in first.names} == {"v1", "v2", "v3"}
        second.down = False
        second.names.clear()
        assert sync.reopen() == []
        sync.push(model, 3)
        assert first.names == second.names
        assert set(first.loaded.values()) <= {1, 2}  # v2 again, after the push that failed
        first.down = second.down = True
        with pytest.raises(ServerUnreachable, match="does not answer"):
            sync.reopen()
        sync.close()
