"""Where weights of a staged push wait: beside the model on its GPU, and in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence


def check_room(sizes: Sequence[int], room: int, host_bytes: int) -> None:
    """Raise ValueError when weights of these bytes fit neither into `room` of the GPU nor into half of `host_bytes`."""
    beyond = 0
    for size in sizes:
        if size > room:
            beyond += size
        else:
            room -= size
    if beyond > host_bytes // 2:
        raise ValueError(
            f"{beyond / 2**30:.1f} GiB of the pushed weights do not fit beside the model on its GPU, and the host has "
            f"{host_bytes / 2**30:.1f} GiB left, of which half may be taken: set server.weight_transfer to nccl"
        )
