"""Weight push over gloo: no GPU, or a network without NCCL. The server's half is sync/vllm_engine.py.

The servers receive beside their model while they go on generating, so they are paused only while the new weights are
put in place.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer_core.sync.base import PushReport, Stopwatch
from trainer_core.sync.gloo_group import GlooGroup
from trainer_core.sync.server_api import ServerApi
from trainer_core.sync.streamed import StreamedSync
from trainer_core.sync.weights import ServedWeight, manifest


class GlooSync(StreamedSync):
    """Stream, while the servers generate with the old weights; pause; apply; resume."""

    def _meeting_point(self, world_size: int) -> tuple[int, Callable[[], GlooGroup]]:
        timeout = datetime.timedelta(seconds=self._push_timeout_s)
        store = GlooGroup.host(world_size, datetime.timedelta(seconds=self._handshake_deadline_s))
        return store.port, lambda: GlooGroup(store, 0, world_size, timeout)

    def _wire_settings(self) -> dict[str, Any]:
        return {"timeout_s": self._push_timeout_s}

    def _send(self, weights: list[ServedWeight], version: int) -> PushReport:
        watch = Stopwatch()
        group = self._group
        announced = manifest(weights, self._dtype)

        def announce(server: ServerApi) -> None:
            server.start_update()
            server.update_weights(announced)

        def stream(tensors: Iterator[torch.Tensor]) -> None:
            for tensor in tensors:
                group.broadcast(tensor)

        def apply(server: ServerApi) -> None:
            server.finish_update(version)
            server.reset_prefix_cache()

        self._on_all("announcing the weights", announce)
        watch.lap("announce")
        self._stream(weights, torch.device("cpu"), stream)
        transfer_s = watch.lap()
        try:
            self._on_all("pausing the servers", ServerApi.pause)
            watch.lap("stop")
            self._on_all("applying the weights", apply)
            watch.lap("apply")
        finally:
            self._on_all("resuming the servers", ServerApi.resume)
        watch.lap("resume")
        pause_s = sum(watch.laps[name] for name in ("stop", "apply", "resume"))
        return PushReport(watch.total(), pause_s, transfer_s, watch.laps)
