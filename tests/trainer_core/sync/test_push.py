"""Pushes to the real server: what it generates afterwards is what the trainer's model generates."""

import threading
from types import SimpleNamespace

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trainer_core.sync import ServerRefused, WeightSyncError, choose_sync
from trainer_core.sync.base import PHASES
from trainer_core.sync.server_api import ServerApi
from trainer_core.sync.staged import GlooSync
from trainer_core.sync.weights import ServedWeight, full_weights

pytestmark = pytest.mark.server

PROMPT = [257, 84, 101, 108, 108]


def config_for(tmp_path, **changes):
    return SimpleNamespace(
        **{
            "weight_sync_timeout": 60.0,
            "vllm_server_timeout": 120.0,
            "max_staleness": 2,
            "output_dir": str(tmp_path),
            "run_name": None,
        }
        | changes
    )


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def disturb(model, scale=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn_like(parameter)


def greedy(server, model_name, tokens=12, prompt=PROMPT):
    request = {"model": model_name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def greedy_reference(model, tokens=12, prompt=PROMPT):
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[len(prompt) :]


@pytest.fixture
def server(tiny_server):
    """The shared server, which gets its original weights back."""
    yield tiny_server
    api = ServerApi(tiny_server.url, 60.0)
    sync = GlooSync([api], full_weights, push_timeout_s=60.0)
    sync.open()
    sync.push(load(tiny_server.model_path), 0)
    sync.close()


def test_full_weights(server, tmp_path):
    torch.manual_seed(1)
    model = load(server.model_path)
    sync = choose_sync(config=config_for(tmp_path), model=model, server_urls=[server.url])
    sync.open()
    seen = {tuple(greedy(server, "policy"))}
    for version in (1, 2, 3):
        disturb(model)
        report = sync.push(model, version)
        assert 0 < report.pause_s < report.total_s < 30
        assert report.transfer_s > 0
        assert set(report.phases) == set(PHASES) - {"stop"}  # standing still overlaps with the new weights
        assert sum(report.phases.values()) + report.transfer_s == pytest.approx(report.total_s, abs=0.05)
        output = greedy(server, sync.model_name(version))
        assert output == greedy_reference(model)
        seen.add(tuple(output))
    sync.close()
    assert len(seen) == 4  # each push changed what is generated


def test_merged_lora(server, tmp_path):
    torch.manual_seed(2)
    # DoRA is something no vLLM serves as an adapter, so that this is merged also where the server knows LoRA.
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
    model = get_peft_model(load(server.model_path), lora)
    sync = choose_sync(config=config_for(tmp_path), model=model, server_urls=[server.url])
    assert isinstance(sync, GlooSync)
    sync.open()
    for version in (1, 2):
        disturb(model)
        sync.push(model, version)
        assert greedy(server, sync.model_name(version)) == greedy_reference(model)
    sync.close()


def test_a_push_while_generating_keeps_requests_alive(server, tmp_path):
    torch.manual_seed(3)
    model = load(server.model_path)
    sync = choose_sync(config=config_for(tmp_path), model=model, server_urls=[server.url])
    sync.open()
    request = {
        "model": "policy",
        "prompt": [[257, 65 + i] for i in range(8)],
        "max_tokens": 300,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answers = []
    with httpx.Client(timeout=120) as client:
        thread = threading.Thread(
            target=lambda: answers.append(client.post(f"{server.url}/v1/completions", json=request))
        )
        thread.start()
        for version in range(1, 6):
            disturb(model, 0.01)
            sync.push(model, version)
        thread.join(timeout=120)
    sync.close()
    assert answers[0].status_code == 200, answers[0].text
    assert [len(choice["token_ids"]) for choice in answers[0].json()["choices"]] == [300] * 8
    assert greedy(server, "policy") == greedy_reference(model)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("model.layers.7.mlp.up_proj.weight", (256, 128), "not in the served model"),
        ("model.layers.1.mlp.up_proj.weight", (128, 256), r"shape \[128, 256\], the served model has \[256, 128\]"),
    ],
)
def test_weights_the_server_does_not_know_are_refused_and_it_goes_on(server, name, shape, sentence):
    before = greedy(server, "policy")
    wrong = ServedWeight(name, shape, lambda: torch.zeros(shape))
    sync = GlooSync(
        [ServerApi(server.url, 60.0)],
        lambda model: [*full_weights(model), wrong],
        push_timeout_s=30.0,
    )
    sync.open()
    model = load(server.model_path)
    disturb(model)
    with pytest.raises(ServerRefused, match=sentence):
        sync.push(model, 1)
    assert greedy(server, "policy") == before
    with pytest.raises(WeightSyncError, match="reopen"):
        sync.push(model, 1)
    sync._weights_of = full_weights
    sync.reopen()
    sync.push(model, 1)
    sync.close()
    assert greedy(server, "policy") == greedy_reference(model)


def test_a_trainer_that_dies_while_sending_leaves_the_old_weights(server):
    before = greedy(server, "policy")
    sync = GlooSync([ServerApi(server.url, 60.0)], full_weights, push_timeout_s=30.0)
    sync.open()
    model = load(server.model_path)
    api = ServerApi(server.url, 30.0)
    weight = full_weights(model)[0]
    api.start_update()
    api.update_weights({"names": [weight.name] * 2, "dtype_names": ["float32"] * 2, "shapes": [list(weight.shape)] * 2})
    sync._group.broadcast(torch.zeros(weight.shape))
    sync._group = None  # closes the connection, as the kernel does for a killed process
    assert greedy(server, "policy") == before
    with pytest.raises(ServerRefused, match=r"closed|reset|timed out|Connection"):
        api.finish_update(1)
    api.abandon_update()
    assert greedy(server, "policy") == before
    sync.reopen()
    disturb(model)
    sync.push(model, 2)
    sync.close()
    api.close()
    assert greedy(server, "policy") == greedy_reference(model)
