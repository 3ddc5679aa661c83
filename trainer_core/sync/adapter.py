"""LoRA pushed as adapters: each version is a folder that the server loads under a new name.

Nothing is paused: rollouts that started under an older version finish under it, as long as that version is kept.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import cast

from peft import PeftModel
from torch import nn

from trainer_core.sync.base import PushReport, Stopwatch, explain, together
from trainer_core.sync.gathering import Summon, gathered
from trainer_core.sync.merged import lora_config
from trainer_core.sync.server_api import ServerApi, ServerInfo, ServerRefused, WeightSyncError

SERVER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for --max-lora-rank."""

# Settings of LoraConfig that vLLM's adapters do not know; such adapters are merged instead.
_NOT_SERVED = ("use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices",
               "alora_invocation_tokens", "layer_replication", "arrow_config", "monteclora_config",
               "use_qalora", "use_bdlora", "kasa_config", "velora_config")  # fmt: skip


def obstacles(model: PeftModel) -> list[str]:
    """What of the LoRA configuration a server cannot load as an adapter; empty when it can."""
    config = lora_config(model)
    found = [name for name in _NOT_SERVED if getattr(config, name, None)]
    if config.bias != "none":
        found.append(f"bias={config.bias}")
    names = {name.rsplit(".", 1)[-1] for name in model.targeted_module_names}
    head = next((n for n, m in model.get_base_model().named_modules() if m is model.get_output_embeddings()), "lm_head")
    if head.rsplit(".", 1)[-1] in names:
        found.append("an adapted output head")
    return found


def largest_rank(model: PeftModel) -> int:
    """The highest rank of any layer of the adapter."""
    config = lora_config(model)
    return max([config.r, *(config.rank_pattern or {}).values()])


def check_limits(info: ServerInfo, url: str, rank: int, max_staleness: int) -> None:
    """Raises WeightSyncError, with the value to restart the server with, when it was started too small."""
    assert info.lora is not None
    if rank > SERVER_RANKS[-1]:
        raise WeightSyncError(f"the adapter has rank {rank}, vLLM serves at most {SERVER_RANKS[-1]}")
    if info.lora.max_lora_rank < rank:
        wanted = next(allowed for allowed in SERVER_RANKS if allowed >= rank)
        raise WeightSyncError(
            f"the server at {url} was started with --max-lora-rank {info.lora.max_lora_rank}, but the adapter has rank "
            f"{rank}: restart it with --max-lora-rank {wanted}"
        )
    if info.lora.max_loras < max_staleness + 2:
        raise WeightSyncError(
            f"the server at {url} was started with --max-loras {info.lora.max_loras}, but max_staleness {max_staleness} keeps "
            f"{max_staleness + 1} versions and one coming in: restart it with --max-loras {max_staleness + 2}"
        )


class AdapterSync:
    """Adapters through a folder that trainer and servers share."""

    def __init__(
        self,
        servers: list[ServerApi],
        *,
        folder: Path,
        run: str,
        keep: int,
        ready_timeout_s: float,
        push_timeout_s: float,
        summon: Summon | None = None,
    ) -> None:
        """`folder` takes the versions, named `<run>-v<N>`; the newest `keep` stay loaded.

        `summon` calls the other trainer ranks, where the model is sharded over them.
        """
        self._summon = summon
        self._servers = servers
        self._folder = folder
        self._run = run
        self._keep = keep
        self._ready_timeout_s = ready_timeout_s
        self._push_timeout_s = push_timeout_s
        self._versions: list[int] = []
        self._base_model = ""

    def open(self) -> None:
        """See WeightSync."""
        self._base_model = self._servers[0].info().base_model

    def push(self, model: nn.Module, version: int) -> PushReport:
        """See WeightSync."""
        watch = Stopwatch()
        self._publish(model, version)
        self._load(version)
        self._versions = [*(kept for kept in self._versions if kept != version), version]
        while len(self._versions) > self._keep:
            self._unload(self._versions.pop(0))
        return PushReport(watch.total(), 0.0, watch.lap())

    def reopen(self) -> None:
        """See WeightSync. A restarted server gets the kept versions back, so that rollouts may go on under theirs."""
        for server in self._servers:
            server.wait_until_healthy(self._ready_timeout_s)
        self.open()
        for version in self._versions:
            self._load(version)

    def model_name(self, version: int) -> str:
        """The adapter of that version; the base model for a version that was never pushed, an untouched adapter."""
        return self._name(version) if version in self._versions else self._base_model

    def close(self) -> None:
        """See WeightSync."""
        for server in self._servers:
            server.close()

    def _name(self, version: int) -> str:
        return f"{self._run}-v{version}"

    def _path(self, version: int) -> Path:
        return self._folder / self._name(version)

    def _publish(self, model: nn.Module, version: int) -> None:
        """Write the adapter and rename it into place, so that a server never reads half of one."""
        tensors = dict(gathered(model, "adapter", self._summon))  # raises for anything but a PeftModel
        target = self._path(version)
        writing = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            cast(PeftModel, model).save_pretrained(str(writing), state_dict=tensors)
            if target.exists():  # of an earlier attempt
                shutil.rmtree(target)
            writing.rename(target)
        except OSError as error:
            raise WeightSyncError(f"the adapter could not be written to {target}: {error.strerror or error}") from error

    def _load(self, version: int) -> None:
        name, path = self._name(version), str(self._path(version).resolve())
        calls = [partial(server.load_adapter, name, path) for server in self._servers]
        try:
            together("loading the adapter", self._push_timeout_s, calls)
        except WeightSyncError as error:
            raise explain(error, self._servers) from error

    def _unload(self, version: int) -> None:
        name = self._name(version)
        for server in self._servers:
            try:
                server.unload_adapter(name)
            except ServerRefused as error:
                if error.status != 404:  # a restarted server never had it
                    raise
        shutil.rmtree(self._path(version), ignore_errors=True)
