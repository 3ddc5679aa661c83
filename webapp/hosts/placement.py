"""Which GPUs of a host a run gets. A GPU may be cut into slots, which several runs share; each slot is a device of its own.

The first slot of a GPU carries the GPU's UUID, the others that UUID with "#2", "#3", ... behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

SLOT_MARK = "#"


S = TypeVar("S", bound=Any)
"""A device as far as its place matters: it has `uuid` and `index`. (Fields of a Django model fit no protocol of mypy's.)"""


@dataclass(frozen=True)
class Placement(Generic[S]):
    """Slots of a run by what they are for, the servers' and the trainer's. No two of a kind are on one GPU.

    With several `replicas` each server has an equal part of `server`, in turn.
    """

    server: list[S]
    trainer: list[S]
    replicas: int = 1

    @property
    def slots(self) -> list[S]:
        """All of them, the server's first."""
        return [*self.server, *self.trainer]

    @property
    def replica_numbers(self) -> list[int | None]:
        """For each slot of `server` the number of its server, from 0; None where there is only one."""
        if self.replicas == 1:
            return [None] * len(self.server)
        return [at * self.replicas // len(self.server) for at in range(len(self.server))]


def slot_uuid(gpu: str, number: int) -> str:
    """The name of a GPU's slot; slots are numbered from 1."""
    return gpu if number == 1 else f"{gpu}{SLOT_MARK}{number}"


def gpu_of(uuid: str) -> str:
    """The UUID of the GPU that a slot is on."""
    return uuid.partition(SLOT_MARK)[0]


def place(slots: Iterable[S], servers: int, trainers: int, replicas: int = 1) -> Placement[S] | None:
    """Slots for `replicas` servers on `servers` GPUs each and a trainer on `trainers` GPUs out of free `slots`; None when they
    do not fit.

    Servers get the GPUs with the most free slots, each neighbours by index. The trainer gets GPUs without a server of the run
    as far as there are any, and these first: weights go over NCCL only where the trainer's first rank has a GPU of its own.
    """
    free: dict[str, list[S]] = defaultdict(list)
    for slot in sorted(slots, key=lambda slot: (slot.index, slot.uuid)):
        free[gpu_of(slot.uuid)].append(slot)

    def take(count: int, avoid: Sequence[str]) -> list[S] | None:
        gpus = sorted(
            (gpu for gpu in free if free[gpu]), key=lambda gpu: (gpu in avoid, -len(free[gpu]), free[gpu][0].index)
        )
        return [free[gpu].pop(0) for gpu in gpus[:count]] if len(gpus) >= count else None

    server = take(servers * replicas, ())
    trainer = None if server is None else take(trainers, [gpu_of(slot.uuid) for slot in server])
    if server is None or trainer is None:
        return None
    return Placement(sorted(server, key=lambda slot: slot.index), trainer, replicas)


def trainer_order(trainer: Sequence[str], server: Sequence[str]) -> list[str]:
    """The trainer's GPUs in the order of its ranks: those that it does not share with the server first."""
    return sorted(trainer, key=lambda gpu: gpu in server)
