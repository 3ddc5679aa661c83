"""How the vLLM server of a run is started: its command line and environment, derived from the RunSpec alone.

Why each setting is as it is, with measurements: docs/serving.md.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Literal

from trainer_core.spec import RunSpec

Device = Literal["cpu", "cuda"]

SERVED_NAME = "policy"
"""The model name under which the server offers the base model."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values vLLM allows for --max-lora-rank."""

MAX_LOGPROBS = 64
"""Most likely tokens a request may ask for at each position."""

CPU_KV_CACHE_GIB = 1.0


@dataclass(frozen=True)
class Command:
    """A process to start: its arguments, and the environment variables it needs besides those of the caller."""

    argv: list[str]
    env: dict[str, str]


def uses_adapter_sync(spec: RunSpec, device: Device) -> bool:
    """Whether the server is started for LoRA adapters, which are then pushed as adapters rather than merged weights."""
    return spec.lora.enabled and device == "cuda"


def serve_command(spec: RunSpec, *, model_path: str, port: int, device: Device) -> Command:
    """The command that serves `model_path` on 127.0.0.1:`port` for this run.

    The server's developer routes (weight push, pause) are not guarded by a key, so it listens on loopback only.
    """
    server = spec.server
    argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model_path]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
    argv += ["--dtype", server.dtype, "--max-model-len", str(server.max_model_len)]
    argv += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)]
    # The model's own generation_config.json would otherwise change sampling behind the trainer's back.
    argv += ["--generation-config", "vllm"]
    argv += ["--disable-uvicorn-access-log"]
    argv += ["--weight-transfer-config", json.dumps({"backend": "gloo" if device == "cpu" else "nccl"})]
    if spec.model.trust_remote_code:
        argv += ["--trust-remote-code"]
    if server.max_num_seqs is not None:
        argv += ["--max-num-seqs", str(server.max_num_seqs)]
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if device == "cpu":
        _add_cpu(spec, argv, env)
    else:
        _add_cuda(spec, argv)
    if uses_adapter_sync(spec, device):
        _add_lora(spec, argv, env)
    return Command(argv, env)


def _kv_cache_bytes(gib: float) -> str:
    return str(int(gib * 2**30))


def _add_cpu(spec: RunSpec, argv: list[str], env: dict[str, str]) -> None:
    # Without an explicit size the server would take nine tenths of the machine's memory.
    argv += ["--kv-cache-memory-bytes", _kv_cache_bytes(spec.server.kv_cache_gib or CPU_KV_CACHE_GIB)]
    argv += ["--enforce-eager"]
    # --enforce-eager leaves one torch.compile in the sampler, which costs some 20 s of C++ compiler at the first request.
    env["TORCHDYNAMO_DISABLE"] = "1"


def _add_cuda(spec: RunSpec, argv: list[str]) -> None:
    if spec.server.kv_cache_gib is not None:
        argv += ["--kv-cache-memory-bytes", _kv_cache_bytes(spec.server.kv_cache_gib)]
    argv += ["--gpu-memory-utilization", str(spec.server.gpu_memory_utilization)]
    argv += ["--tensor-parallel-size", str(spec.resources.rollout_gpus)]
    if spec.server.enforce_eager:
        argv += ["--enforce-eager"]


def _add_lora(spec: RunSpec, argv: list[str], env: dict[str, str]) -> None:
    rank = next(rank for rank in LORA_RANKS if rank >= spec.lora.r)
    # Rollouts that began under an old version finish under it: max_staleness + 1 versions live, plus the one coming in.
    argv += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(spec.rollout.max_staleness + 2)]
    env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
