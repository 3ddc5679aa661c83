"""One gloo process group of its own, beside torch's default group and without touching it: both ends of a push use it."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist


class GlooGroup:
    """Rank 0 (the trainer) and the workers of one or several servers; rank 0 broadcasts."""

    def __init__(
        self,
        store: dist.TCPStore,
        rank: int,
        world_size: int,
        *,
        join_timeout: datetime.timedelta,
        timeout: datetime.timedelta,
    ) -> None:
        """`join_timeout` bounds the wait for the other ranks here, `timeout` each broadcast later."""
        self._store = store  # the group reads from it as long as it lives
        self._timeout = timeout
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, join_timeout)

    @staticmethod
    def host(world_size: int, timeout: datetime.timedelta) -> dist.TCPStore:
        """The store of a new group, on a free port (`.port`) of this machine, for rank 0."""
        return dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        join_timeout: datetime.timedelta,
        timeout: datetime.timedelta,
    ) -> GlooGroup:
        """Join a group whose store rank 0 holds at host:port. Blocks until all ranks are there.

        Raises RuntimeError (torch.distributed.DistError) when they are not within `join_timeout`.
        """
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=join_timeout, wait_for_workers=False)
        return cls(store, rank, world_size, join_timeout=join_timeout, timeout=timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send (rank 0) or overwrite (other ranks) a contiguous CPU tensor.

        Raises RuntimeError when a peer is gone or the timeout has passed; the group is then of no more use.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait()

    def wait(self) -> None:
        """Nothing: a broadcast returns when it is done."""

    def abort(self) -> None:
        """Nothing: each broadcast has a deadline."""
