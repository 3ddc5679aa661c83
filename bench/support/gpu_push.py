"""Times weight pushes of a Qwen3-0.6B shape over NCCL: trainer.sync's own classes, a real server, 1.19 GB of bf16.

The server is started at once; the pushes wait until the file GO is there. After the last push of each kind the server's greedy
tokens and their log-probabilities are compared with the trainer's, for prompts of one random token each.

With one GPU both are on it, and NCCL is made to take them for two hosts: bytes then go through sockets, so that only what is
not transfer means anything.

usage: python -m bench.support.gpu_push --out FILE --gpus SERVER_UUID [TRAINER_UUID] [--backend nccl] [--go FILE] [--end TIME]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

SHAPE = {
    "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
PUSHES = 8
CLIENTS = 8
PROMPT = [5, 6, 7]


def main() -> int:
    arguments = _arguments()
    server_gpu, trainer_gpu = (arguments.gpus * 2)[:2]
    folder = arguments.out.parent / "push-model"
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": trainer_gpu}
    hosts = {} if server_gpu != trainer_gpu else {"NCCL_HOSTID": "server", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= hosts and {**hosts, "NCCL_HOSTID": "trainer"}
    model = _write_model(folder)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = arguments.out.with_name("server.log")
    process = _start_server(folder, port, server_gpu, log, arguments.backend, hosts)
    found: dict[str, Any] = {"backend": arguments.backend, "gpus": len(set(arguments.gpus))}
    try:
        url = f"http://127.0.0.1:{port}"
        begin = time.time()
        while not _healthy(url):
            if process.poll() is not None or time.time() > arguments.end:
                raise RuntimeError(f"the server was not ready (exit code {process.poll()})")
            time.sleep(0.5)
        found["server"] = {"waited_s": round(time.time() - begin, 1)}
        while arguments.go and not arguments.go.exists() and time.time() < arguments.end:
            time.sleep(0.25)
        measure(url, model, arguments.backend, found, lambda: arguments.out.write_text(json.dumps(found)))
    except Exception as error:
        found["error"] = {"type": type(error).__name__, "text": str(error)[:500]}
        raise
    finally:
        arguments.out.write_text(json.dumps(found))
        _end(process, arguments.backend)
    return 0


def measure(url: str, model: Any, backend: str, found: dict[str, Any], save: Any) -> None:
    """Push `model` PUSHES times in each of several ways; milliseconds by phase go into `found`."""
    import torch

    from trainer_core.sync import STREAMED
    from trainer_core.sync.weights import full_weights

    server = _timed_server(url)
    sync = STREAMED[backend]([server], full_weights, push_timeout_s=60)
    began = time.perf_counter()
    sync.open()
    found["handshake"] = {"ms": round(1000 * (time.perf_counter() - began), 1)}
    version = 0
    ways = (("bf16, idle server", torch.bfloat16, False), ("bf16, busy server", torch.bfloat16, True),
            ("float32 cast to bf16, idle server", torch.float32, False))  # fmt: skip
    for name, dtype, busy in ways:
        model.to(dtype)
        rows = []
        with _clients(url) if busy else _nothing():
            for _ in range(PUSHES):
                _change(model)
                torch.cuda.synchronize()
                server.times.clear()
                version += 1
                report = sync.push(model, version)
                rows.append(
                    {"total": report.total_s, "paused": report.pause_s, "transfer": report.transfer_s, **server.times}
                )
        rows = rows[1:]  # the first one allocates
        found[name] = {key: round(1000 * sorted(row[key] for row in rows)[len(rows) // 2], 1) for key in rows[0]}
        found[name]["gather_and_cast"] = round(1000 * _gather_s(model), 1)
        found[name]["gigabytes"] = round(sum(p.numel() for p in model.parameters()) * 2 / 1e9, 3)
        found[name]["agreement"] = _agreement(url, model.to(torch.bfloat16))
        save()
    sync.close()


def _timed_server(url: str) -> Any:
    """A ServerApi that remembers the seconds of each route, by its last word."""
    from trainer_core.sync.server_api import ServerApi

    class Timed(ServerApi):
        times: dict[str, float]

        def _call(self, method: str, route: str, **request: Any) -> Any:
            began = time.perf_counter()
            try:
                return super()._call(method, route, **request)
            finally:
                self.times[route.rsplit("/", 1)[-1]] = time.perf_counter() - began

    server = Timed(url, 60)
    server.times = {}
    return server


def _change(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.01)


def _gather_s(model: Any) -> float:
    """Seconds that making the tensors takes, without sending them."""
    import torch

    from trainer_core.sync.weights import full_weights, made

    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in made(full_weights(model), torch.bfloat16, torch.device("cuda", torch.cuda.current_device())):
        pass
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _agreement(url: str, model: Any) -> dict[str, float]:
    """Share of prompts with the same most likely next token, and by how much its log-probability differs."""
    import torch

    prompts = [[token] for token in range(100, 100 + 64)]
    body = {
        "model": "policy", "prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    choices = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    theirs = [choice["token_ids"][0] for choice in sorted(choices, key=lambda choice: choice["index"])]
    told = [choice["logprobs"]["token_logprobs"][0] for choice in sorted(choices, key=lambda choice: choice["index"])]
    with torch.no_grad():
        own = model(torch.tensor(prompts, device="cuda")).logits[:, -1].float().log_softmax(-1)
    gaps = (own.gather(1, torch.tensor(theirs, device="cuda")[:, None])[:, 0].cpu() - torch.tensor(told)).abs()
    same = (own.argmax(-1).cpu() == torch.tensor(theirs)).float().mean()
    lead = own.topk(2, dim=-1).values
    return {
        "same": round(float(same), 3), "gap_max": round(float(gaps.max()), 4), "gap_mean": round(float(gaps.mean()), 4),
        "lead_median": round(float((lead[:, 0] - lead[:, 1]).median()), 4),
    }  # fmt: skip


@contextmanager
def _clients(url: str) -> Any:
    """Requests that keep the server generating."""
    over = threading.Event()

    def ask() -> None:
        body = {
            "model": "policy",
            "prompt": PROMPT * 20,
            "max_tokens": 64,
            "n": 8,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        while not over.is_set():
            with suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(20)


@contextmanager
def _nothing() -> Any:
    yield


def _write_model(folder: Path) -> Any:
    """A model of random weights on the GPU, saved with the built-in model's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    builtin = Path(os.environ["OFFBEAT_MODELS"]) / "smollm2-135m-instruct"
    shutil.copytree(builtin, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def _start_server(
    folder: Path, port: int, gpu: str, log: Path, backend: str, hosts: dict[str, str]
) -> subprocess.Popen[bytes]:
    from trainer_core.spec import RunSpec
    from webapp.runs.commands import serve_command
    from workers.launching import environment
    from workers.processes import start

    spec = RunSpec.model_validate({
        "lora": {"enabled": False}, "rollout": {"max_completion_length": 128},
        "server": {"max_model_len": 1024, "enforce_eager": True, "kv_cache_gib": 4.0},
    })  # fmt: skip
    command = serve_command(spec, model_path=str(folder), port=port, device="cuda", gpu_share=0.1)
    command.argv[command.argv.index("--weight-transfer-config") + 1] = json.dumps({"backend": backend})
    return start(command.argv, env=environment(f"push-{backend}", [gpu], "cuda", command.env | hosts), log=log)


def _healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False


def _end(process: subprocess.Popen[bytes], backend: str) -> None:
    from workers.processes import end, sweep

    end(process, 3.0)
    sweep(f"push-{backend}", {process.pid})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--go", type=Path)
    parser.add_argument("--gpus", nargs="+", required=True)
    parser.add_argument("--backend", default="nccl-staged", choices=["nccl", "nccl-staged", "gloo"])
    parser.add_argument("--end", type=float, default=time.time() + 600)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
