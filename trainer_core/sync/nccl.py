"""Weight push over NCCL, between GPUs, through vLLM's own engine.

vLLM 0.28 moved the choice of packed transfers from each update to the handshake; both variants are spoken, told apart by
the fields of vLLM's own messages. The trainer's vLLM must be of the servers' version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from trainer_core.sync.base import PushReport, Stopwatch
from trainer_core.sync.server_api import ServerApi, WeightSyncError
from trainer_core.sync.streamed import StreamedSync, address_towards
from trainer_core.sync.weights import ServedWeight, manifest


class NcclSync(StreamedSync):
    """Pause; stream into the servers' models; resume.

    vLLM's engine takes a model's parameters apart while it receives, so a server must not generate meanwhile.
    """

    def _meeting_point(self, world_size: int) -> tuple[int, Callable[[], Any]]:
        from vllm.utils.network_utils import get_open_port

        port = get_open_port()
        device = torch.cuda.current_device()  # a new thread would begin on device 0
        meeting = {
            "master_address": address_towards(self._servers[0].url),
            "master_port": port,
            "world_size": world_size,
        }

        def join() -> Any:
            torch.cuda.set_device(device)
            return _engine().trainer_init(meeting)

        return port, join

    def _end(self, group: Any) -> None:
        group.destroy()

    def _wire_settings(self) -> dict[str, Any]:
        return {"packed": True} if _packed_at_handshake() else {}

    def _send(self, weights: list[ServedWeight], version: int) -> PushReport:
        group, device = self._group, torch.cuda.current_device()
        announced = manifest(weights, self._dtype)
        update = announced if _packed_at_handshake() else {**announced, "packed": True}

        def stream(tensors: Iterator[torch.Tensor]) -> None:
            torch.cuda.set_device(device)
            _broadcast(zip([weight.name for weight in weights], tensors, strict=True), group)
            torch.cuda.synchronize()

        watch = Stopwatch()
        transfer_s = 0.0
        try:
            self._on_all("pausing the servers", ServerApi.pause)
            watch.lap("stop")
            self._on_all("starting the update", ServerApi.start_update)
            receive = [partial(server.update_weights, update) for server in self._servers]
            watch.lap("announce")
            self._stream(weights, torch.device("cuda", device), stream, receive)
            transfer_s = watch.lap()
            self._on_all("applying the weights", lambda server: server.finish_update(version))
            self._on_all("clearing the prefix cache", ServerApi.reset_prefix_cache)
            watch.lap("apply")
        finally:
            self._on_all("resuming the servers", ServerApi.resume)
        watch.lap("resume")
        total_s = watch.total()
        return PushReport(total_s, total_s, transfer_s, watch.laps)


def _nccl_module() -> Any:
    try:
        from vllm.distributed.weight_transfer import nccl_engine
    except ImportError as error:
        raise WeightSyncError(f"a push over NCCL needs vllm in the trainer's environment too: {error}") from error
    return nccl_engine


@cache
def _packed_at_handshake() -> bool:
    fields = dataclasses.fields(_nccl_module().NCCLWeightTransferInitInfo)
    return "packed" in {field.name for field in fields}


def _engine() -> Any:
    """What opens the trainer's end: a function of nccl_common since 0.28, a method of the engine before."""
    if _packed_at_handshake():
        from vllm.distributed.weight_transfer import nccl_common

        return nccl_common
    return _nccl_module().NCCLWeightTransferEngine


def _broadcast(named: Iterator[tuple[str, torch.Tensor]], group: Any) -> None:
    if _packed_at_handshake():
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(iterator=named, group=group, src=0, post_iter_func=lambda item: item[1])
        return
    module = _nccl_module()
    arguments = module.NCCLTrainerSendWeightsArgs(group=group, packed=True)
    module.NCCLWeightTransferEngine.trainer_send_weights(iterator=named, trainer_args=arguments)
