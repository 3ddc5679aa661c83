"""Where weights of a staged push wait: beside the model on its GPU, and in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence


def fitting(sizes: Sequence[int], room: int) -> list[bool]:
    """Which weights of these bytes wait in `room` bytes of the GPU, in order; the largest other one lands there first."""
    if sum(sizes) <= room:
        return [True] * len(sizes)
    room -= max(sizes)
    found = []
    for size in sizes:
        found.append(size <= room)
        room -= size * found[-1]
    return found


def pinned(size: int) -> int:
    """Bytes that torch pins for `size`: the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def check_host(sizes: Sequence[int], available: int) -> None:
    """Raise ValueError when weights of these bytes would take more than half of `available` bytes of the host."""
    beyond = sum(map(pinned, sizes))
    if beyond > available // 2:
        raise ValueError(
            f"{beyond / 2**30:.1f} GiB are needed for pushed weights that do not fit beside the model on its GPU, and the "
            f"host has {available / 2**30:.1f} GiB left for this server, of which half may be taken: set "
            "server.weight_transfer to nccl"
        )
