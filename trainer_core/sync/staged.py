"""Pushes that the servers receive beside their model: the pause covers only putting the new weights in place.

The servers' half is sync/vllm_engine.py. Two ways to send: gloo (no GPU, one GPU for server and trainer, or a network without
NCCL) and NCCL.
"""

from __future__ import annotations

import datetime
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from trainer_core.sync.base import PushReport, Stopwatch
from trainer_core.sync.gloo_group import GlooGroup
from trainer_core.sync.nccl_group import NcclGroup
from trainer_core.sync.server_api import ServerApi, ServerUnreachable, WeightSyncError
from trainer_core.sync.streamed import StreamedSync, address_towards
from trainer_core.sync.weights import ServedWeight, manifest

LOOK_EVERY_S = 2.0
MOST_MISSED = 3
"""So many looks in a row that a server does not answer are taken for its end."""


class StagedSync(StreamedSync):
    """Stream, while the servers generate with the old weights; then pause, apply and resume."""

    def _wire_settings(self) -> dict[str, Any]:
        return {"timeout_s": self._push_timeout_s, "join_timeout_s": self._handshake_deadline_s}

    @abstractmethod
    def _sending_device(self) -> torch.device:
        """Where tensors must be to be sent."""

    def _send(self, weights: list[ServedWeight], version: int) -> PushReport:
        watch = Stopwatch()
        group, device = self._group, self._sending_device()
        announced = manifest(weights, self._dtype)

        def announce(server: ServerApi) -> None:
            server.start_update()
            server.update_weights(announced)

        sent = threading.Event()

        def stream(tensors: Iterator[torch.Tensor]) -> None:
            if device.type == "cuda":  # a new thread would begin on device 0
                torch.cuda.set_device(device)
            for tensor in tensors:
                group.broadcast(tensor)
            group.wait()
            sent.set()

        failures: list[WeightSyncError] = []

        def apply(server: ServerApi) -> None:
            # vLLM answers a pause 20 ms after it has begun. The weights need not wait for that: they change as a whole,
            # between two steps of the engine, and what a step made of old keys and new weights is forgotten right after.
            # No pause may come after a resume, so that all are waited for, whatever fails.
            try:
                with ThreadPoolExecutor(1) as pausing:
                    paused = pausing.submit(server.pause)
                    server.finish_update(version)
                    server.reset_prefix_cache()
                paused.result()
            except WeightSyncError as error:
                failures.append(error)

        self._on_all("announcing the weights", announce)
        watch.lap("announce")
        try:
            self._stream(weights, device, stream, [partial(_stay_alive, server, sent) for server in self._servers])
        finally:
            sent.set()
        transfer_s = watch.lap()
        try:
            self._on_all("pausing the servers and applying the weights", apply)
            watch.lap("apply")
            for failure in failures:
                raise failure
        finally:
            self._on_all("resuming the servers", ServerApi.resume)
        watch.lap("resume")
        pause_s = watch.laps["apply"] + watch.laps["resume"]
        return PushReport(watch.total(), pause_s, transfer_s, watch.laps)


def _stay_alive(server: ServerApi, sent: threading.Event) -> None:
    """Raise ServerUnreachable when the server is gone before `sent`: a transfer over NCCL does not notice."""
    missed = 0
    while not sent.wait(LOOK_EVERY_S):
        missed = 0 if server.is_healthy() else missed + 1
        if missed == MOST_MISSED:
            raise ServerUnreachable(server.url, f"the server at {server.url} stopped answering during a weight push")


class GlooSync(StagedSync):
    """Through the host's memory."""

    def _sending_device(self) -> torch.device:
        return torch.device("cpu")

    def _meeting_point(self, world_size: int) -> tuple[int, Callable[[], GlooGroup]]:
        timeout = datetime.timedelta(seconds=self._push_timeout_s)
        join = datetime.timedelta(seconds=self._handshake_deadline_s)
        store = GlooGroup.host(world_size, join)
        return store.port, lambda: GlooGroup(store, 0, world_size, join_timeout=join, timeout=timeout)


class StagedNcclSync(StagedSync):
    """From GPU to GPU. The trainer's vLLM must be of the servers' version."""

    def _sending_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _meeting_point(self, world_size: int) -> tuple[int, Callable[[], NcclGroup]]:
        from vllm.utils.network_utils import get_open_port

        port, device = get_open_port(), self._sending_device()
        host, timeout_s = address_towards(self._servers[0].url), self._handshake_deadline_s

        def join() -> NcclGroup:
            torch.cuda.set_device(device)
            return NcclGroup(host, port, rank=0, world_size=world_size, timeout_s=timeout_s)

        return port, join
