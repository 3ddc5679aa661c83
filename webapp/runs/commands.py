"""The commands of server and trainer, derived from the RunSpec alone: the supervisor runs them, the form shows them.

Why each setting is as it is, with measurements: docs/serving.md.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer_core.spec import LORA_RANKS, RunSpec

Device = Literal["cpu", "cuda"]

NOT_FOR_CHILDREN = ("DATABASE_URL", "CELERY_BROKER_URL", "DJANGO_SETTINGS_MODULE", "CUDA_VISIBLE_DEVICES")
"""Variables of the studio's own environment that no program with a model's or a person's code gets."""

SERVED_NAME = "policy"
"""The model name under which the server offers the base model."""

MAX_LOGPROBS = 64
"""Most likely tokens a request may ask for at each position, and the largest top-k whose tokens are told that way."""

CPU_KV_CACHE_GIB = 1.0
CPU_BLOCK_SIZE = 32


@dataclass(frozen=True)
class Command:
    """A process to start: its arguments, and the environment variables it needs besides those of the caller."""

    argv: list[str]
    env: dict[str, str]


def uses_adapter_sync(spec: RunSpec, device: Device) -> bool:
    """Whether the server is started for LoRA adapters, which are then pushed as adapters rather than merged weights.

    Not on a CPU, unless asked for: there vLLM's LoRA layers take four times the processor time of the model itself, while
    merged weights cost a second a push (docs/serving.md).
    """
    adapters_pay = device == "cuda" and spec.server.api_servers == 1  # several refuse to load adapters
    return spec.lora.enabled and (spec.lora.push == "adapter" or (spec.lora.push == "auto" and adapters_pay))


def transfer_backend(spec: RunSpec, device: Device, apart: bool) -> str:
    """How full weights travel. NCCL refuses two processes on one GPU, so then they go through the host's memory."""
    if device == "cpu" or not apart:
        return "gloo"
    return "nccl" if spec.server.weight_transfer == "auto" else spec.server.weight_transfer


def serve_command(
    spec: RunSpec, *, model_path: str, port: int, device: Device, gpu_share: float = 1.0, apart: bool = True
) -> Command:
    """The command that serves `model_path` on 127.0.0.1:`port` for this run.

    `gpu_share` is the part of each GPU that is the server's; `apart` says that the trainer's first rank has another GPU.
    The server's developer routes (weight push, pause) are not guarded by a key, so it listens on loopback only.
    """
    server = spec.server
    argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model_path]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
    argv += ["--dtype", server.dtype, "--max-model-len", str(server.max_model_len)]
    wide = spec.rollout.top_k > MAX_LOGPROBS and device == "cuda"
    most = MAX_LOGPROBS if wide else max(MAX_LOGPROBS, spec.rollout.top_k)
    argv += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(most)]
    # The model's own generation_config.json would otherwise change sampling behind the trainer's back.
    argv += ["--generation-config", "vllm"]
    argv += ["--disable-uvicorn-access-log"]
    argv += ["--weight-transfer-config", json.dumps({"backend": transfer_backend(spec, device, apart)})]
    if spec.model.trust_remote_code:
        argv += ["--trust-remote-code"]
    if server.api_servers > 1:
        argv += ["--api-server-count", str(server.api_servers)]
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
        _add_cuda(spec, argv, gpu_share)
    if wide:  # a mask is smaller than log-probabilities of all these tokens; a CPU server cannot give one
        argv += ["--return-sampling-mask", "--enable-scale-out"]
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
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
    # vLLM would pin its threads to the first cores, those of a second server too. Servers share half of the cores, the other
    # half is for the trainer.
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 2 // spec.resources.server_replicas))
    env["OMP_WAIT_POLICY"] = "passive"


def _add_cuda(spec: RunSpec, argv: list[str], gpu_share: float) -> None:
    if spec.server.kv_cache_gib is not None:
        argv += ["--kv-cache-memory-bytes", _kv_cache_bytes(spec.server.kv_cache_gib)]
    argv += ["--gpu-memory-utilization", str(round(spec.server.gpu_memory_utilization * gpu_share, 4))]
    argv += ["--tensor-parallel-size", str(spec.resources.rollout_gpus)]
    if spec.server.enforce_eager:
        argv += ["--enforce-eager"]


def _add_lora(spec: RunSpec, argv: list[str], env: dict[str, str]) -> None:
    rank = next(rank for rank in LORA_RANKS if rank >= spec.lora.r)
    # Rollouts that began under an old version finish under it: max_staleness + 1 versions live, plus the one coming in.
    argv += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(spec.rollout.max_staleness + 2)]
    env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"


@dataclass(frozen=True)
class TrainerPlan:
    """What a trainer is started with on one host. With more than one process they meet at `rendezvous`, (address, port).

    `processes` are those of all `hosts`, of which this is number `host_rank`; number 0 leads and owns the address. `resume` is
    a checkpoint of the run; `start` holds the weights a forked run begins with while it has none of its own.
    """

    run_dir: Path
    attempt_dir: Path
    model: Path
    servers: list[str]
    resume: Path | None
    processes: int
    rendezvous: tuple[str, int] | None
    start: Path | None = None
    hosts: int = 1
    host_rank: int = 0


def fsdp_launcher(
    processes: int, port: int, address: str = "127.0.0.1", hosts: int = 1, host_rank: int = 0
) -> list[str]:
    """Arguments of an interpreter that start a module in several processes, the model sharded over them.

    The processes are those of all `hosts`, and this starts the share of host number `host_rank`; all meet at `port` of host
    0, whose address is `address`. FSDP2, a shard group for each decoder layer. accelerate watches the processes that it
    started: when one ends, it ends the others.
    """
    meeting = ["--machine_rank", str(host_rank), "--main_process_ip", address, "--same_network"] if hosts > 1 else []
    return [
        "-m", "accelerate.commands.launch", "--num_machines", str(hosts), "--num_processes", str(processes),
        *meeting, "--main_process_port", str(port), "--mixed_precision", "no", "--dynamo_backend", "no",
        "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_reshard_after_forward", "true", "--fsdp_state_dict_type", "SHARDED_STATE_DICT",
        "--fsdp_cpu_ram_efficient_loading", "false",
    ]  # fmt: skip


def train_command(plan: TrainerPlan) -> Command:
    """The trainer as docs/architecture.md has it: one process, or one for each training GPU under `accelerate launch`."""
    module = ["-m", "trainer_core.launch"]
    if plan.processes > 1:
        assert plan.rendezvous is not None, "several processes need a place to meet at"
        address, port = plan.rendezvous
        module = [*fsdp_launcher(plan.processes, port, address, plan.hosts, plan.host_rank), *module]
    argv = [sys.executable, *module, "--spec", str(plan.run_dir / "spec.yaml"), "--run-dir", str(plan.run_dir)]
    argv += ["--attempt-dir", str(plan.attempt_dir), "--model", str(plan.model)]
    for server in plan.servers:
        argv += ["--server", server]
    if plan.resume is not None:
        argv += ["--resume", str(plan.resume)]
    elif plan.start is not None:
        argv += ["--start-from", str(plan.start)]
    return Command(argv, {})


def check_command(run_dir: Path, resume: Path | None) -> Command:
    """The trainer's own checks of what it will load: prompts, rewards, tools, environment, the checkpoint to resume from."""
    argv = [sys.executable, "-m", "trainer_core.inputs"]
    argv += ["--spec", str(run_dir / "spec.yaml"), "--run-dir", str(run_dir)]
    return Command(argv if resume is None else [*argv, "--resume", str(resume)], {})


def preview(spec: RunSpec, model_path: str, device: Device) -> list[dict[str, str]]:
    """All commands as a shell would take them; folder, ports and rendezvous of the run stand as words in capitals.

    Several servers are told apart by their ports and, on a host with GPUs, by what they see of them; counted from 0 here.
    """
    replicas = spec.resources.server_replicas
    ports = ["PORT"] if replicas == 1 else [f"PORT{number}" for number in range(replicas)]
    servers = [_preview_server(spec, model_path, device, port) for port in ports]
    plan = TrainerPlan(
        Path("RUN"), Path("RUN/attempts/1"), Path(model_path), [f"http://127.0.0.1:{port}" for port in ports], None,
        spec.resources.ranks(on_cpu=device == "cpu"), rendezvous=("ADDRESS", 0), hosts=spec.resources.trainer_hosts,
    )  # fmt: skip
    train = train_command(plan)
    if replicas > 1 and device == "cuda":
        counts = [spec.resources.rollout_gpus] * replicas + [spec.resources.trainer_gpus]
        for at, command in enumerate((*servers, train)):
            command.env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(sum(counts[:at]), sum(counts[: at + 1]))))
    for command in (*servers, train):
        command.env.update(dict.fromkeys(spec.secrets, "<secret>"))
    titles = ["vLLM server"] if replicas == 1 else [f"vLLM server {number}" for number in range(replicas)]
    shown = zip([*titles, "Trainer"], [*servers, train], strict=True)
    return [{"title": title, "text": shell_text(command)} for title, command in shown]


def _preview_server(spec: RunSpec, model_path: str, device: Device, port: str) -> Command:
    serve = serve_command(spec, model_path=model_path, port=0, device=device)
    serve.argv[serve.argv.index("--port") + 1] = port
    return serve


def shell_text(command: Command) -> str:
    """A command as it can be pasted into a shell; the interpreter is called python."""
    words = ["python", *command.argv[1:]]
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in command.env.items()), shlex.join(words)])
