"""What pushes of full weights have in common: one group of trainer and servers, and what happens when one of them fails."""

from __future__ import annotations

import ipaddress
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from trainer_core.sync.base import PushReport, answering, explain, together
from trainer_core.sync.gathering import Relay
from trainer_core.sync.server_api import ServerApi, WeightSyncError
from trainer_core.sync.weights import ServedWeight, made

HANDSHAKE_DEADLINE_S = 60.0


class StreamedSync(ABC):
    """Pushes what `weights_of(model)` gives to all servers through one group, in which this trainer is rank 0.

    See WeightSync for the public methods. After a failed push nothing is connected until `reopen`. `summon` calls the other
    trainer ranks, where the model is sharded over them.
    """

    def __init__(
        self,
        servers: list[ServerApi],
        weights_of: Callable[[nn.Module], list[ServedWeight]],
        *,
        push_timeout_s: float,
        summon: Callable[[], None] | None = None,
    ) -> None:
        self._all_servers = servers
        self._servers = servers  # those that are connected
        self._weights_of = weights_of
        self._summon = summon
        self._push_timeout_s = push_timeout_s
        self._group: Any = None
        self._base_model = ""
        self._dtype = torch.float32

    def open(self) -> None:
        """Make the group. Servers and trainer meet at the same time, each waiting for the other."""
        self._leave()
        infos = [server.info() for server in self._servers]
        self._base_model = infos[0].base_model
        self._dtype = getattr(torch, infos[0].dtype)
        world_size = 1 + sum(info.workers for info in infos)
        port, join = self._meeting_point(world_size)
        groups: list[Any] = []
        calls: list[Callable[[], None]] = [lambda: groups.append(join())]
        rank = 1
        for server, info in zip(self._servers, infos, strict=True):
            init_info = {
                "master_address": address_towards(server.url),
                "master_port": port,
                "rank_offset": rank,
                "world_size": world_size,
                **self._wire_settings(),
            }
            calls.append(partial(server.init_transfer, init_info))
            rank += info.workers
        try:
            together("connecting to the servers for weight pushes", self._handshake_deadline_s, calls)
        except (WeightSyncError, RuntimeError) as error:
            raise explain(error, self._servers) from error
        self._group = groups[0]

    def reopen(self) -> list[str]:
        self._servers = answering(self._all_servers)
        self.open()
        return [server.url for server in self._all_servers if server not in self._servers]

    def push(self, model: nn.Module, version: int) -> PushReport:
        if self._group is None:
            raise WeightSyncError("the servers are not connected: reopen after a failed push")
        try:
            return self._send(self._weights_of(model), version)
        except (WeightSyncError, RuntimeError) as error:
            self._leave()
            failure = explain(error, self._servers)
            for server in self._servers:
                with suppress(WeightSyncError):  # the failure that led here is the one to tell
                    server.abandon_update()
            raise failure from error

    def model_name(self, version: int) -> str:
        """Always the base model: full weights replace one another."""
        return self._base_model

    def close(self) -> None:
        self._leave()
        for server in self._all_servers:
            server.close()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._end(group)

    def _end(self, group: Any) -> None:
        """Leave a group for good, whatever is still under way in it."""
        group.abort()

    @property
    def _handshake_deadline_s(self) -> float:
        return min(HANDSHAKE_DEADLINE_S, self._push_timeout_s)

    def _on_all(self, what: str, call: Callable[[ServerApi], None]) -> None:
        together(what, self._push_timeout_s, [partial(call, server) for server in self._servers])

    def _stream(
        self,
        weights: list[ServedWeight],
        device: torch.device | None,
        send: Callable[[Iterator[torch.Tensor]], None],
        others: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Run `send` over the tensors of the weights, on `device` and in the servers' dtype, together with `others`."""
        if self._summon is None:
            tensors = made(weights, self._dtype, device)
            together("sending the weights", self._push_timeout_s, [lambda: send(tensors), *others])
            return
        relay = Relay(weights, self._dtype, device, self._summon)
        calls = [lambda: send(iter(relay)), *others]
        together("sending the weights", self._push_timeout_s, calls, meanwhile=relay.gather)

    @abstractmethod
    def _meeting_point(self, world_size: int) -> tuple[int, Callable[[], Any]]:
        """A port of this machine on which the ranks meet, and a call that waits there and gives the group."""

    @abstractmethod
    def _wire_settings(self) -> dict[str, Any]:
        """What besides addresses and ranks the servers must know of the transfer."""

    @abstractmethod
    def _send(self, weights: list[ServedWeight], version: int) -> PushReport:
        """One push, on rank 0."""


def address_towards(url: str) -> str:
    """The address of this machine that a server at `url` can reach it by."""
    host = urlsplit(url).hostname or "localhost"
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # datagram sockets send nothing on connect; the kernel only picks a route
        return probe.getsockname()[0]
