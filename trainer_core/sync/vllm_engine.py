"""The server's half of the gloo weight push: an engine for vLLM's weight-transfer interface that needs no GPU.

Staged: weights are received beside the model, by a thread, while the server goes on generating with the old ones. Names
and shapes are compared with the served checkpoint before anything is received, and `finish_weight_update`, which vLLM
runs between two engine steps, loads all of them at once. A push that fails at any earlier point leaves the model as it
was. (Engines that load while they receive leave the parameters on the meta device in between, and a request in that time
ends the server.)
"""

from __future__ import annotations

import datetime
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from trainer_core.sync.gloo_group import GlooGroup


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer, rank 0, waits. Ranks of this server begin at `rank_offset`; `timeout_s` bounds every wait."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What the trainer sends next, in this order: checkpoint names, torch dtype names, shapes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class StagedGlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives checkpoint-format weights over a gloo group of its own."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None
        self._timeout_s = 0.0
        self._staged: list[tuple[str, torch.Tensor]] = []
        self._receiver: ThreadPoolExecutor | None = None
        self._received: list[Future[None]] = []
        self._checkpoint_shapes: dict[str, list[int]] | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, in place of any earlier one."""
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._timeout_s = init_info.timeout_s
        self._group = GlooGroup.join(
            init_info.master_address,
            init_info.master_port,
            rank=rank,
            world_size=init_info.world_size,
            timeout=datetime.timedelta(seconds=init_info.timeout_s),
        )
        self._receiver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-receiver")

    def start_weight_update(self) -> None:
        """Forget what an abandoned update may have left. The model is not touched."""
        self._staged = []
        self._received = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check what is announced, then receive it in the background.

        Raises ValueError, before anything is received, when the served model has no such weights.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """See `update_weights`, whose base class would also synchronise an accelerator that is not there."""
        if self._group is None or self._receiver is None:
            raise RuntimeError("no trainer is connected: call init_weight_transfer_engine first")
        self._check(update_info)
        self._received.append(self._receiver.submit(self._receive, self._group, update_info))

    def finish_weight_update(self) -> None:
        """Wait for what was announced and load it into the model, all or nothing."""
        for received in self._received:
            try:
                received.result(timeout=self._timeout_s)
            except FutureTimeout as error:
                raise TimeoutError(f"the weights did not arrive within {self._timeout_s:.0f} s") from error
        staged, self._staged, self._received = self._staged, [], []
        initialize_layerwise_reload(self.model)
        cast(Any, self.model).load_weights(iter(staged))
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the next engine step must see them

    def shutdown(self) -> None:
        """Leave the group. A receive that is under way ends with an error of its own."""
        if self._receiver is not None:
            self._receiver.shutdown(wait=False, cancel_futures=True)
        self._receiver = None
        self._group = None
        self._staged = []
        self._received = []

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Nothing: vLLM before 0.28 wants this method, but Offbeat's trainer sends through GlooSync."""
        raise NotImplementedError("weights are sent by trainer_core.sync.gloo")

    def _receive(self, group: GlooGroup, update: GlooUpdateInfo) -> None:
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(weight)
            self._staged.append((name, weight))

    def _check(self, update: GlooUpdateInfo) -> None:
        if not len(update.names) == len(update.dtype_names) == len(update.shapes):
            raise ValueError("names, dtype_names and shapes differ in length")
        if self._checkpoint_shapes is None:
            self._checkpoint_shapes = checkpoint_shapes(self.model_config.model, self.model_config.revision)
        known = self._checkpoint_shapes
        if unknown := [name for name in update.names if name not in known]:
            raise ValueError(f"{len(unknown)} pushed weights are not in the served model, the first is {unknown[0]!r}")
        for name, shape in zip(update.names, update.shapes, strict=True):
            if list(shape) != known[name]:
                raise ValueError(f"{name} was pushed with shape {list(shape)}, the served model has {known[name]}")


def checkpoint_shapes(model: str, revision: str | None) -> dict[str, list[int]]:
    """Names and shapes of a checkpoint (a folder, or a hub id that is in the cache), read from safetensors headers."""
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors files, so pushed weights cannot be checked against it")
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes.update({name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return shapes
