"""The commands that the form shows are those that the supervisor starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from django.test import Client

from trainer_core.spec import ResourceSpec, RunSpec
from webapp.hosts.models import Device, Host
from webapp.runs.commands import Command, TrainerPlan, preview, serve_command, shell_text, train_command
from webapp.runs.sample import sample_spec


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_preview_is_what_will_be_started(device: str) -> None:
    spec = sample_spec()
    shown = {item["title"]: shlex.split(item["text"]) for item in preview(spec, "/models/m", device)}  # type: ignore[arg-type]
    serve = serve_command(spec, model_path="/models/m", port=8123, device=device)  # type: ignore[arg-type]
    words = [*(f"{name}={value}" for name, value in serve.env.items()), "python", *serve.argv[1:]]
    assert [word.replace("PORT", "8123") if word == "PORT" else word for word in shown["vLLM server"]] == words
    plan = TrainerPlan(Path("RUN"), Path("RUN/attempts/1"), Path("/models/m"), ["http://127.0.0.1:PORT"], None, 1, None)
    assert shown["Trainer"][1:] == train_command(plan).argv[1:]


def test_each_host_of_several_starts_its_share_of_the_ranks() -> None:
    spec = RunSpec(resources=ResourceSpec(trainer_gpus=4, trainer_hosts=2))
    text = preview(spec, "MODEL", "cuda")[1]["text"]
    assert "--num_machines 2 --num_processes 8 --machine_rank 0 --main_process_ip ADDRESS --same_network" in text
    assert (
        spec.samples_per_step
        == 8 * spec.training.per_device_train_batch_size * spec.training.gradient_accumulation_steps
    )
    alone = preview(RunSpec(resources=ResourceSpec(trainer_gpus=4)), "MODEL", "cuda")[1]["text"]
    assert "--num_machines 1 --num_processes 4 --main_process_port" in alone


def test_several_servers_are_shown_each_on_its_port_and_its_gpus() -> None:
    spec = sample_spec()
    spec.resources = ResourceSpec(server_replicas=2, rollout_gpus=2, trainer_gpus=1)
    shown = {item["title"]: shlex.split(item["text"]) for item in preview(spec, "/models/m", "cuda")}
    assert list(shown) == ["vLLM server 0", "vLLM server 1", "Trainer"]
    seen = [next(word for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")) for words in shown.values()]
    assert [text.partition("=")[2] for text in seen] == ["0,1", "2,3", "4"]
    ports = [words[words.index("--port") + 1] for title, words in shown.items() if title != "Trainer"]
    assert ports == ["PORT0", "PORT1"]
    asked = [word for word in shown["Trainer"] if word.startswith("http://")]
    assert asked == [f"http://127.0.0.1:{port}" for port in ports]
    assert "2" in shown["vLLM server 0"][shown["vLLM server 0"].index("--tensor-parallel-size") + 1]
    on_cpu = preview(spec, "/models/m", "cpu")
    assert "CUDA_VISIBLE_DEVICES" not in on_cpu[0]["text"]


def test_several_api_servers_are_asked_for_and_rule_out_adapters() -> None:
    spec = sample_spec()
    spec.lora.push = "auto"
    usual = serve_command(spec, model_path="/models/m", port=8123, device="cuda")
    assert "--api-server-count" not in usual.argv
    assert "--enable-lora" in usual.argv
    spec.server.api_servers = 4
    several = serve_command(spec, model_path="/models/m", port=8123, device="cuda")
    assert several.argv[several.argv.index("--api-server-count") + 1] == "4"
    assert "--enable-lora" not in several.argv
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in several.env  # vLLM refuses to start with both


def test_shell_text_quotes_what_a_shell_would_take_apart() -> None:
    command = Command(["/usr/bin/python3", "-m", "x", "--config", '{"a": "b c"}', "it's"], {"NAME": "a b"})
    assert shlex.split(shell_text(command)) == ["NAME=a b", "python", "-m", "x", "--config", '{"a": "b c"}', "it's"]


@pytest.mark.django_db
def test_the_form_shows_the_commands_for_the_devices_there_are(as_ada: Client) -> None:
    from tests.webapp.runs.test_forking import form_of

    def commands() -> list[dict[str, str]]:
        return as_ada.post("/runs/check/", form_of(sample_spec())).json()["commands"]

    assert "--kv-cache-memory-bytes" in commands()[0]["text"]
    host = Host.objects.create(name="big")
    Device.objects.create(host=host, uuid="GPU-1", kind="gpu", name="H200")
    assert "--gpu-memory-utilization" in commands()[0]["text"]
    assert commands()[1]["text"].startswith("python -m trainer_core.launch --spec RUN/spec.yaml")
