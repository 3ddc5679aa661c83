"""LoRA pushed as adapters: each version is a folder that the server loads under a new name.

Nothing is paused: rollouts that started under an older version finish under it, as long as that version is kept. A version
that became too old goes at the next push, not at the one that made it so: until then the rollout worker has been told, and
has given up what still ran under it. (A request whose folder is gone can end vLLM's engine, which reads an adapter again
when it made room for another one.)
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from peft import PeftModel
from torch import nn

from trainer_core.adapters import PLAIN_INITS
from trainer_core.spec import LORA_RANKS
from trainer_core.sync.base import PushReport, Stopwatch, answering, explain, together
from trainer_core.sync.gathering import Summon, gathered
from trainer_core.sync.merged import lora_config
from trainer_core.sync.server_api import ServerApi, ServerInfo, WeightSyncError

# Settings of LoraConfig that vLLM's adapters do not know; such adapters are merged instead.
_NOT_SERVED = ("use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices",
               "alora_invocation_tokens", "layer_replication", "arrow_config", "monteclora_config",
               "use_qalora", "use_bdlora", "kasa_config", "velora_config")  # fmt: skip

# Ranks and scales of single layers, which older servers take to be those of all layers.
_PATTERNS = ("rank_pattern", "alpha_pattern")
_PATTERNS_SINCE = (0, 32)


def obstacles(model: PeftModel, vllm_version: str) -> list[str]:
    """What of the LoRA configuration a server of that version cannot load as an adapter; empty when it can."""
    config = lora_config(model)
    unknown = _NOT_SERVED if _release(vllm_version) >= _PATTERNS_SINCE else (*_NOT_SERVED, *_PATTERNS)
    found = [name for name in unknown if getattr(config, name, None)]
    if config.init_lora_weights not in PLAIN_INITS:  # the base changed, or a matrix does not train and is not pushed
        found.append(f"init_lora_weights={config.init_lora_weights}")
    if config.bias != "none":
        found.append(f"bias={config.bias}")
    names = {name.rsplit(".", 1)[-1] for name in model.targeted_module_names}
    head = next((n for n, m in model.get_base_model().named_modules() if m is model.get_output_embeddings()), "lm_head")
    if head.rsplit(".", 1)[-1] in names:
        found.append("an adapted output head")
    return found


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, such as 0.32.0 or 0.33.0rc1+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def largest_rank(model: PeftModel) -> int:
    """The highest rank of any layer of the adapter."""
    config = lora_config(model)
    return max([config.r, *(config.rank_pattern or {}).values()])


def check_limits(info: ServerInfo, url: str, rank: int, max_staleness: int) -> None:
    """Raises WeightSyncError, with the value to restart the server with, when it was started too small."""
    assert info.lora is not None
    if rank > LORA_RANKS[-1]:
        raise WeightSyncError(f"the adapter has rank {rank}, vLLM serves at most {LORA_RANKS[-1]}")
    if info.lora.max_lora_rank < rank:
        wanted = next(allowed for allowed in LORA_RANKS if allowed >= rank)
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
        push_timeout_s: float,
        summon: Summon | None = None,
    ) -> None:
        """`folder` takes the versions, named `<run>-v<N>`; a push finds the newest `keep` loaded and adds one.

        `summon` calls the other trainer ranks, where the model is sharded over them.
        """
        self._summon = summon
        self._all_servers = servers
        self._servers = servers  # those that are connected
        self._folder = folder
        self._run = run
        self._keep = keep
        self._push_timeout_s = push_timeout_s
        self._versions: list[int] = []
        self._base_model = ""

    def open(self) -> None:
        """See WeightSync."""
        self._base_model = self._servers[0].info().base_model

    def push(self, model: nn.Module, version: int) -> PushReport:
        """See WeightSync. A version that was pushed before stays as it is: `reopen` has given it to every server."""
        watch = Stopwatch()
        while len(self._versions) > self._keep:
            self._retire(self._versions[0])
        if version not in self._versions:
            self._publish(model, version)
            path = str(self._path(version).resolve())
            self._on_all(partial(_replace, self._name(version), path))
            self._versions.append(version)
        return PushReport(watch.total(), 0.0, watch.lap())

    def reopen(self) -> list[str]:
        """See WeightSync. A restarted server gets the kept versions back, so that rollouts may go on under theirs."""
        self._servers = answering(self._all_servers)
        self.open()
        kept = {self._name(version): str(self._path(version).resolve()) for version in self._versions}
        self._on_all(partial(_complete, kept))
        return [server.url for server in self._all_servers if server not in self._servers]

    def model_name(self, version: int) -> str:
        """The adapter of that version; the base model for a version that was never pushed, an untouched adapter."""
        return self._name(version) if version in self._versions else self._base_model

    def close(self) -> None:
        """See WeightSync."""
        for server in self._all_servers:
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

    def _on_all(self, load: Callable[[ServerApi], None]) -> None:
        try:
            together("loading the adapter", self._push_timeout_s, [partial(load, server) for server in self._servers])
        except WeightSyncError as error:
            raise explain(error, self._servers) from error

    def _retire(self, version: int) -> None:
        for server in self._servers:
            server.unload_adapter(self._name(version))
        shutil.rmtree(self._path(version), ignore_errors=True)
        self._versions.remove(version)


def _replace(name: str, path: str, server: ServerApi) -> None:
    """Load an adapter, also where the name is taken: by a push that failed half-way, or by an earlier trainer."""
    if server.unload_adapter(name):
        server.reset_prefix_cache()  # keys and values are remembered by the adapter's name and path
    server.load_adapter(name, path)


def _complete(adapters: dict[str, str], server: ServerApi) -> None:
    """Load those of the adapters (paths by name) that the server lacks."""
    there = server.adapters()
    for name, path in adapters.items():
        if name not in there:
            server.load_adapter(name, path)
