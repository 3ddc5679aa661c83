"""The server command: derived from the RunSpec, accepted by the real server; and what the server's log says."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.vllm_server import tiny_spec
from workers.serving import readiness, serve_command, startup_failure

LOGS = Path(__file__).parent / "server_logs"  # of vLLM 0.32, each failure provoked; paths and process ids replaced


def flags(command):
    """{flag: value} of a command; a flag without value has None."""
    found = {}
    arguments = command.argv[command.argv.index("serve") + 2 :]
    for position, argument in enumerate(arguments):
        if argument.startswith("--"):
            following = arguments[position + 1] if position + 1 < len(arguments) else "--"
            found[argument] = None if following.startswith("--") else following
    return found


def command(device="cpu", place=None, **sections):
    return serve_command(tiny_spec(**sections), model_path="/models/m", port=8123, device=device, **(place or {}))


def test_what_every_server_gets():
    for device in ("cpu", "cuda"):
        found = flags(command(device, server={"max_model_len": 777, "dtype": "float16"}))
        assert (found["--host"], found["--port"]) == ("127.0.0.1", "8123")
        assert (found["--max-model-len"], found["--dtype"]) == ("777", "float16")
        assert found["--logprobs-mode"] == "processed_logprobs"
        env = command(device).env
        assert {env[name] for name in ("VLLM_SERVER_DEV_MODE", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS")} == {"1"}


def test_the_backend_follows_the_device():
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        assert json.loads(flags(command(device))["--weight-transfer-config"]) == {"backend": backend}


@pytest.mark.parametrize("wanted", ["nccl", "nccl-staged", "gloo"])
def test_the_run_may_choose_the_backend_where_there_is_a_choice(wanted):
    server = {"weight_transfer": wanted}
    for device, place, backend in (
        ("cuda", {"apart": True}, wanted), ("cuda", {"apart": False}, "gloo"), ("cpu", {}, "gloo"),
    ):  # fmt: skip
        found = flags(command(device, place=place, server=server))
        assert json.loads(found["--weight-transfer-config"]) == {"backend": backend}


def test_on_a_shared_gpu_the_server_takes_its_part_and_weights_do_not_go_over_nccl():
    found = flags(command("cuda", place={"gpu_share": 0.5, "apart": False}, server={"gpu_memory_utilization": 0.8}))
    assert found["--gpu-memory-utilization"] == "0.4"
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "gloo"}
    found = flags(command("cuda", place={"gpu_share": 1 / 6, "apart": True}))
    assert found["--gpu-memory-utilization"] == "0.15"
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "nccl"}


def test_lora_is_pushed_as_the_run_says():
    wanted = {(device, push): "--enable-lora" in flags(command(device, lora={"enabled": True, "push": push}))
              for device in ("cpu", "cuda") for push in ("auto", "adapter", "merged")}  # fmt: skip
    assert [key for key, served in wanted.items() if served] == [
        ("cpu", "adapter"),
        ("cuda", "auto"),
        ("cuda", "adapter"),
    ]
    assert "--enable-lora" not in flags(command("cuda", lora={"enabled": False, "push": "adapter"}))


def test_a_cpu_server_never_takes_memory_by_share():
    found = flags(command(server={"kv_cache_gib": 0.5}))
    assert found["--kv-cache-memory-bytes"] == str(2**29)
    assert "--gpu-memory-utilization" not in found
    assert flags(command(server={"kv_cache_gib": None}))["--kv-cache-memory-bytes"] == str(2**30)


def test_lora_on_a_gpu_is_served_as_adapters_with_room_for_every_version():
    serve = command("cuda", lora={"enabled": True, "r": 20}, rollout={"max_staleness": 3})
    assert flags(serve)["--max-lora-rank"] == "32"
    assert flags(serve)["--max-loras"] == "5"
    assert serve.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in flags(command("cpu", lora={"enabled": True}))
    assert "--enable-lora" not in flags(command("cuda", lora={"enabled": False}))


def test_the_module_stays_light():
    code = "import sys, workers.serving; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        ("port_in_use", 1, "Another program took the port"),
        ("missing_folder", 1, "/nonexistent/model does not exist"),
        ("empty_folder", 1, "/models/broken is not a model"),
        ("unknown_architecture", 1, "type gpt_nonsense"),
        ("unknown_flag", 2, "--frobnicate"),
        ("context_beyond_model", 1, "set it to at most 2048"),
        ("out_of_memory", 1, "only 8.5 GiB are free, but the KV cache is to take 2000.0 GiB"),
        ("context_beyond_kv_cache", 1, "A context of server.max_model_len 512 does not fit"),
    ],
)
def test_why_a_server_did_not_come_up(log, code, says):
    sentence = startup_failure((LOGS / f"{log}.txt").read_text(), code)
    assert says in sentence
    assert sentence.count("\n") == 0
    assert sentence.endswith(".")


def test_a_failure_nobody_knows_still_names_the_exception_or_the_signal():
    assert "TypeError: odd" in startup_failure("(EngineCore pid=1) TypeError: odd\nmore\n", 1)
    assert "signal 11" in startup_failure("", -11)
    assert "ran out of memory" in startup_failure("", -9)


def test_readiness_moves_on_through_a_real_log():
    lines = (LOGS / "ready.txt").read_text().splitlines(keepends=True)
    phrases = []
    for count in range(len(lines) + 1):
        phrase = readiness("".join(lines[:count]))
        if not phrases or phrases[-1] != phrase:
            phrases.append(phrase)
    assert phrases == [
        "importing vLLM",
        "reading the configuration",
        "starting the engine",
        "loading weights",
        "preparing the model",
        "warming up",
        "opening the HTTP routes",
        "ready",
    ]


@pytest.mark.server
def test_the_server_starts_and_serves_the_tiny_model(tiny_server):
    models = httpx.get(f"{tiny_server.url}/v1/models", timeout=10).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("policy", 512)]
    assert readiness(tiny_server.log.read_text()) == "ready"
