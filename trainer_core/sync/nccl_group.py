"""One NCCL group of its own, beside torch's default group: both ends of a staged push over NCCL use it.

It is vLLM's own communicator, so trainer and servers must have the same release of vLLM.
"""

from __future__ import annotations

from typing import Any

import torch


class NcclGroup:
    """Rank 0 (the trainer) and the workers of one or several servers; rank 0 broadcasts from its current GPU."""

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the others at host:port, where rank 0 listens. Blocks until all ranks are there.

        Raises RuntimeError (torch.distributed.DistError) when they are not within the timeout.
        """
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self._meeting = StatelessProcessGroup.create(
            host=host, port=port, rank=rank, world_size=world_size, store_timeout=max(1, int(timeout_s))
        )
        self._communicator: Any = PyNcclCommunicator(self._meeting, device=torch.cuda.current_device())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send (rank 0) or overwrite (other ranks) a contiguous tensor of this rank's GPU, on its current stream."""
        self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    def wait(self) -> None:
        """Until all that was sent or received is there. It has no deadline: where a peer is gone, `abort` ends it."""
        torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """End the group, and kernels that wait for a peer that is gone. A GPU with such a kernel would never be idle again."""
        self._communicator.destroy()
