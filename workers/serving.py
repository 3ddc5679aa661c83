"""How the vLLM server of a run is started: its command line and environment, derived from the RunSpec alone.

Why each setting is as it is, with measurements: docs/serving.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
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
CPU_BLOCK_SIZE = 32


@dataclass(frozen=True)
class Command:
    """A process to start: its arguments, and the environment variables it needs besides those of the caller."""

    argv: list[str]
    env: dict[str, str]


def uses_adapter_sync(spec: RunSpec, device: Device) -> bool:
    """Whether the server is started for LoRA adapters, which are then pushed as adapters rather than merged weights.

    Not on a CPU: there vLLM's LoRA layers take four times the processor time of the model itself, while merged weights
    cost a second a push (docs/serving.md).
    """
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
    # The smallest that vLLM's CPU attention takes. Rollouts of a group share whole blocks of their prompt only; at the
    # default of 128 short prompts are computed once for each rollout.
    argv += ["--block-size", str(CPU_BLOCK_SIZE)]
    env["TORCHDYNAMO_DISABLE"] = "1"  # eager mode leaves one torch.compile in the sampler: 20 s of C++ compiler
    # vLLM would pin its threads to the first cores, those of a second server too; the other half is for the trainer.
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 2))
    env["OMP_WAIT_POLICY"] = "passive"


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


# What vLLM 0.32 logs on its way up, in this order; the last one found is how far it is.
_PROGRESS = (
    ("non-default args", "reading the configuration"),
    ("Resolved architecture", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing the model"),
    ("GPU KV cache size", "warming up"),
    ("CPU KV cache size", "warming up"),
    ("init engine", "opening the HTTP routes"),
    ("Application startup complete", "ready"),
)


def readiness(log_text: str) -> str:
    """How far a starting server is, as a phrase such as "loading weights"."""
    return next((phrase for mark, phrase in reversed(_PROGRESS) if mark in log_text), "importing vLLM")


# First match wins. Groups of the pattern may stand in the sentence.
_FAILURES: tuple[tuple[str, str], ...] = (
    (
        r"Address already in use",
        "Another program took the port that the server was to listen on; start the run again to get another one.",
    ),
    (
        r"unrecognized arguments: (.+)",
        "This vLLM does not know the arguments {0}; install a version that Offbeat is tested with (README).",
    ),
    (
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=(\d+)",
        "server.max_model_len is {0}, but the model's context ends at {1}; set it to at most {1}.",
    ),
    (
        r"max seq len \((\d+)\)[^\n]*?KV cache is needed[^\n]*?available KV cache memory \(([^)]*)\)",
        "A context of server.max_model_len {0} does not fit into the KV cache of {1}; lower it, or raise "
        "server.kv_cache_gib.",
    ),
    (
        r"No available memory for the cache blocks",
        "The model leaves no memory for a KV cache; raise server.gpu_memory_utilization or take a smaller model.",
    ),
    (
        r"CUDA out of memory|torch\.OutOfMemoryError|Free memory on device .* is less than desired",
        "The GPU has too little free memory; lower server.gpu_memory_utilization or server.max_model_len, or free it.",
    ),
    (
        r"Available memory on node \d+ \(([\d.]+)/[\d.]+ GiB\)[^\n]*?requested memory for kv \(([\d.]+) GiB\)",
        "On this host only {0} GiB are free, but the KV cache is to take {1} GiB; lower server.kv_cache_gib.",
    ),
    (
        r"can't allocate memory|Cannot allocate memory|MemoryError|Not enough memory|not enough memory",
        "The machine has too little free memory; lower server.kv_cache_gib, take a smaller model, or end other programs.",
    ),
    (
        r"Repo id must be in the form[^\n]*?: '([^']+)'",
        "The model folder {0} does not exist on this host; give an existing folder or the id of a model on the hub.",
    ),
    (
        r"Invalid repository ID or local directory specified: '([^']+)'",
        "{0} is not a model: a folder with a config.json, or the id of a model on the hub, is needed.",
    ),
    (
        r"has model type `([^`]+)` but Transformers does not recognize",
        "The model has type {0}, which this version of vLLM cannot serve; choose another model.",
    ),
    (
        r"Model architectures \[([^\]]+)\] are not supported",
        "The model has architecture {0}, which this version of vLLM cannot serve; choose another model.",
    ),
    (
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'https://huggingface.co'",
        "The model is not in the cache of this host and the hub cannot be reached; give a local folder.",
    ),
    (
        r"EngineDeadError|Engine core proc \w+ died|died unexpectedly",
        "The server's engine process died while it was running; it is started again, and its log shows what it did last.",
    ),
)


def startup_failure(log_text: str, returncode: int) -> str:
    """Why a server ended, in one sentence with what to do, from its log and exit code (negative: a signal)."""
    for pattern, sentence in _FAILURES:
        if match := re.search(pattern, log_text):
            return sentence.format(*match.groups())
    if returncode == -signal.SIGKILL:
        return "The server was killed (SIGKILL), most often by a machine that ran out of memory; lower server.kv_cache_gib."
    errors = re.findall(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(\w*(?:Error|Exception): .+)$", log_text, flags=re.MULTILINE)
    how = f"by signal {-returncode}" if returncode < 0 else f"with code {returncode}"
    return (
        f"The server ended {how}: {errors[-1].strip(' .')[:300]}."
        if errors
        else f"The server ended {how}; see its log."
    )
