"""The server that generates, and the devices of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer_core.spec.section import ADVANCED, Dtype, Section

MOST_SERVERS = 16
"""vLLM servers of one run."""


class ServerSpec(Section):
    """The vLLM server that generates."""

    max_model_len: int = Field(
        4096, ge=16, title="Context length", description="Prompt and completion together, in tokens."
    )
    dtype: Dtype = Field("bfloat16", title="Server dtype", description="Precision the server generates in.")
    kv_cache_gib: float | None = Field(
        None, gt=0, title="KV cache (GiB)", description="Size of the KV cache; empty: a share of the device's memory "
        "on a GPU, 1 GiB on a CPU.", json_schema_extra=ADVANCED)  # fmt: skip
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, title="GPU memory share", description="Share of the GPU (of its slot, where runs share a GPU) the "
        "server may take.",
        json_schema_extra=ADVANCED)  # fmt: skip
    max_num_seqs: int | None = Field(
        None, ge=1, title="Max sequences in a batch", description="Empty: vLLM's default.", json_schema_extra=ADVANCED
    )
    enforce_eager: bool = Field(False, title="Eager mode", description="Start faster, generate slower. Always on for "
                                "a CPU.", json_schema_extra=ADVANCED)  # fmt: skip
    startup_timeout: float = Field(
        600.0, gt=0, title="Start-up timeout (s)", description="How long the server may take to be ready.",
        json_schema_extra=ADVANCED)  # fmt: skip
    api_servers: int = Field(
        1, ge=1, le=32, title="API servers", json_schema_extra=ADVANCED,
        description="Processes that answer requests. Several (8, say) help where one is busy writing top log-probabilities: "
        "large batches on a fast GPU, vLLM 0.32 or newer. LoRA adapters then go to the server merged.",
    )  # fmt: skip
    request_timeout: float = Field(
        600.0, gt=0, title="Request timeout (s)", json_schema_extra=ADVANCED,
        description="One completion; a slower one fails its rollout.",
    )  # fmt: skip
    weight_sync_timeout: float = Field(
        1800.0, gt=0, title="Weight push timeout (s)", json_schema_extra=ADVANCED,
        description="One push of new weights to the server.",
    )  # fmt: skip
    weight_transfer: Literal["auto", "nccl", "nccl-staged", "gloo"] = Field(
        "auto", title="Weight transfer", json_schema_extra=ADVANCED,
        description="How whole weights go to the server: nccl while it stands still, nccl-staged beside the running model, so "
        "that it stands still for less but holds the weights twice (not yet run on two GPUs), gloo through the memory of the "
        "host. auto: nccl. On a CPU, and on a GPU that server and trainer share, gloo whatever is set.",
    )  # fmt: skip
    max_restarts: int = Field(3, ge=0, title="Restarts", description="How often each server that died is started "
                              "again in one attempt.", json_schema_extra=ADVANCED)  # fmt: skip


class ResourceSpec(Section):
    """Devices of the run. On a host without a GPU one CPU slot is taken instead."""

    server_replicas: int = Field(
        1, ge=1, le=MOST_SERVERS, title="vLLM servers", description="Servers that generate side by side, each with the whole "
        "model; rollouts go to the least busy. On a CPU they share the cores.",
    )  # fmt: skip
    rollout_gpus: int = Field(
        1, ge=1, le=64, title="GPUs of a server", description="GPUs that one vLLM server spans (tensor parallel): more than "
        "one where the model does not fit on it; otherwise take more servers.",
    )  # fmt: skip
    trainer_gpus: int = Field(
        1,
        ge=1,
        le=64,
        title="Trainer GPUs",
        description="GPUs of the trainer on each of its hosts, one process each; the model is sharded over all of them.",
    )
    trainer_hosts: int = Field(
        1,
        ge=1,
        le=64,
        title="Trainer hosts",
        json_schema_extra=ADVANCED,
        description="Hosts that the trainer is spread over; each gives as many GPUs. Servers are on the first.",
    )
    cpu_ranks: int = Field(
        1,
        ge=1,
        le=8,
        title="Trainer processes on a CPU",
        json_schema_extra=ADVANCED,
        description="Of each of its hosts. Only for trying out several trainer processes on hosts without a GPU, where GPU "
        "counts mean nothing.",
    )

    def ranks(self, *, on_cpu: bool) -> int:
        """Processes of the trainer on all its hosts together."""
        return self.trainer_hosts * (self.cpu_ranks if on_cpu else self.trainer_gpus)
