"""LoRA pushed as adapters to a server that was started for it, and what is refused before that."""

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny_model import tiny_qwen3
from tests.trainer_core.sync.test_push import config_for, disturb, greedy, greedy_reference, load
from tests.vllm_server import running_server, tiny_spec
from trainer_core.sync import WeightSyncError, choose_sync
from trainer_core.sync.adapter import AdapterSync, check_limits, obstacles
from trainer_core.sync.gloo import GlooSync
from trainer_core.sync.server_api import LoraLimits, ServerInfo
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
    ],
    ids=str,
)
def test_what_a_server_cannot_load_as_an_adapter(settings, found):
    assert obstacles(lora_model(**settings)) == found


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


@pytest.mark.server
@pytest.mark.slow
def test_adapters_against_a_server_with_lora(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "uses_adapter_sync", lambda spec, device: True)
    spec = tiny_spec(lora={"enabled": True, "r": 8}, rollout={"max_staleness": 1})
    torch.manual_seed(5)
    model = lora_model()
    config = config_for(tmp_path, max_staleness=1, run_name="my run/1")
    with running_server(spec, tiny_qwen3(), tmp_path / "server.log") as server:
        sync = choose_sync(config=config, model=model, server_urls=[server.url])
        assert isinstance(sync, AdapterSync)
        sync.open()
        assert sync.model_name(0) == "policy"
        outputs = {}
        for version in (1, 2, 3):
            disturb(model, 0.2)
            report = sync.push(model, version)
            assert report.pause_s == 0
            outputs[version] = greedy(server, sync.model_name(version))
            assert outputs[version] == greedy_reference(model)
        # An older version that is kept still answers as it did; the oldest is gone.
        assert greedy(server, sync.model_name(2)) == outputs[2] != outputs[3]
        names = {entry["id"] for entry in httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"]}
        assert names == {"policy", "my-run-1-v2", "my-run-1-v3"}
        assert {path.name for path in (tmp_path / ".vllm_lora").iterdir()} == {"my-run-1-v2", "my-run-1-v3"}

        for version in (2, 3):  # what a restart forgets
            httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": f"my-run-1-v{version}"}, timeout=10)
        sync.reopen()
        assert greedy(server, sync.model_name(3)) == outputs[3]
        assert greedy(server, sync.model_name(2)) == outputs[2]
        sync.close()

        # The same server takes merged weights of what it could not load.
        dora = lora_model(use_dora=True)
        merged = choose_sync(config=config, model=dora, server_urls=[server.url])
        assert isinstance(merged, GlooSync)
        merged.open()
        disturb(dora, 0.05)
        merged.push(dora, 1)
        assert greedy(server, merged.model_name(1)) == greedy_reference(dora)
        merged.close()

        with pytest.raises(WeightSyncError, match="restart it with --max-loras 9"):
            choose_sync(config=config_for(tmp_path, max_staleness=7), model=model, server_urls=[server.url])
