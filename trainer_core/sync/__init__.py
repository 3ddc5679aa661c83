"""Weight push: keeping the servers' weights those of the trainer.

`choose_sync` picks the way: LoRA adapters where server and adapter allow it, else full weights (merged, under LoRA) over
NCCL or gloo, as the servers were started.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from peft import PeftModel
from torch import nn

from trainer_core.sync.adapter import AdapterSync, check_limits, largest_rank, obstacles
from trainer_core.sync.base import PushReport, WeightSync
from trainer_core.sync.gathering import WEIGHTS, Kind, Summon
from trainer_core.sync.merged import check_mergeable
from trainer_core.sync.nccl import NcclSync
from trainer_core.sync.server_api import ServerApi, ServerInfo, ServerRefused, ServerUnreachable, WeightSyncError
from trainer_core.sync.staged import GlooSync, StagedNcclSync

if TYPE_CHECKING:
    from trainer_core.config import AsyncGRPOConfig

__all__ = [
    "PushReport",
    "ServerRefused",
    "ServerUnreachable",
    "WeightSync",
    "WeightSyncError",
    "choose_sync",
]

logger = logging.getLogger(__name__)

STREAMED: dict[str | None, type[GlooSync | StagedNcclSync | NcclSync]] = {
    "gloo": GlooSync,
    "nccl-staged": StagedNcclSync,
    "nccl": NcclSync,
}
"""How whole weights go, by the transfer backend that the servers were started with."""


def choose_sync(
    *, config: AsyncGRPOConfig, model: nn.Module, server_urls: Sequence[str], summon: Summon | None = None
) -> WeightSync:
    """The way to push this model's weights to these servers, which must be ready; call `open` on it next.

    `summon` calls the other trainer ranks to `gathering.take_part`, where the model is sharded over them.

    Raises WeightSyncError with one sentence when the servers were not started for it.
    """
    servers = [ServerApi(url, config.weight_sync_timeout) for url in server_urls]
    infos = [server.info() for server in servers]
    _check_alike(servers, infos)
    timeout_s = config.weight_sync_timeout
    if isinstance(model, PeftModel):
        if infos[0].lora is not None:
            if not (found := obstacles(model, infos[0].vllm_version)):
                for server, info in zip(servers, infos, strict=True):
                    check_limits(info, server.url, largest_rank(model), config.max_staleness)
                return AdapterSync(
                    servers,
                    folder=Path(str(config.output_dir)) / ".vllm_lora",
                    run=_plain_name(config.run_name or Path(str(config.output_dir)).name),
                    keep=config.max_staleness + 1,
                    push_timeout_s=timeout_s,
                    summon=summon,
                )
            logger.warning("pushing merged weights, because the server cannot load adapters with %s", ", ".join(found))
        check_mergeable(model)
    kind: Kind = "merged" if isinstance(model, PeftModel) else "full"
    summon_kind = None if summon is None else partial(summon, kind)
    backend = infos[0].transfer_backend
    if backend in STREAMED:
        return STREAMED[backend](servers, WEIGHTS[kind], push_timeout_s=timeout_s, summon=summon_kind)
    raise WeightSyncError(
        f"the server at {servers[0].url} was started with weight transfer backend {backend or 'none'}: restart it with "
        """--weight-transfer-config '{"backend": "nccl"}' (GPU) or '{"backend": "gloo"}'"""
    )


def _check_alike(servers: list[ServerApi], infos: list[ServerInfo]) -> None:
    for server, info in zip(servers[1:], infos[1:], strict=True):
        for name in ("base_model", "dtype", "transfer_backend", "vllm_version", "lora"):
            first, other = getattr(infos[0], name), getattr(info, name)
            if first != other:
                raise WeightSyncError(
                    f"the servers must be alike, but {name} is {first} at {servers[0].url} and {other} at {server.url}"
                )


def _plain_name(text: str) -> str:
    """A name that may stand in a path and in a request."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "run"
