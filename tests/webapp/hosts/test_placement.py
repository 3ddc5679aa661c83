"""Which GPUs a run gets where GPUs are cut into slots, and which of them the trainer's first rank has."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.hosts.placement import gpu_of, place, slot_uuid, trainer_order


@dataclass(frozen=True)
class Slot:
    uuid: str
    index: int


def slots(*counts: int) -> list[Slot]:
    """`counts[i]` free slots on GPU i."""
    return [Slot(slot_uuid(f"GPU-{i}", n + 1), i) for i, count in enumerate(counts) for n in range(count)]


def gpus(found: list[Slot]) -> list[str]:
    return [gpu_of(slot.uuid) for slot in found]


def test_a_slot_is_named_after_its_gpu_and_the_first_is_the_gpu_itself() -> None:
    assert [slot_uuid("GPU-a", number) for number in (1, 2, 3)] == ["GPU-a", "GPU-a#2", "GPU-a#3"]
    assert {gpu_of(uuid) for uuid in ("GPU-a", "GPU-a#2", "GPU-a#64")} == {"GPU-a"}


@pytest.mark.parametrize(
    ("free", "servers", "trainers", "server", "trainer"),
    [
        ((1, 1), 1, 1, [0], [1]),
        ((2,), 1, 1, [0], [0]),  # the only GPU is shared
        ((1, 2), 1, 1, [1], [0]),  # the GPU with most room serves; the trainer keeps away from it
        ((4, 4), 1, 1, [0], [1]),
        ((3, 3), 1, 2, [0], [1, 0]),  # two ranks: the first one has no server beside it
        ((1, 1, 1), 2, 1, [0, 1], [2]),
        ((2, 1), 2, 1, [0, 1], [0]),
    ],
)
def test_server_and_trainer_are_kept_apart_where_there_is_room(
    free: tuple[int, ...], servers: int, trainers: int, server: list[int], trainer: list[int]
) -> None:
    found = place(slots(*free), servers, trainers)
    assert found is not None
    assert gpus(found.server) == [f"GPU-{i}" for i in server]
    assert gpus(found.trainer) == [f"GPU-{i}" for i in trainer]


def test_each_of_several_servers_has_neighbours_and_no_gpu_is_in_two() -> None:
    found = place(slots(1, 2, 1, 2, 1), 2, 1, replicas=2)
    assert found is not None
    assert gpus(found.server) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert found.replica_numbers == [0, 0, 1, 1]
    assert gpus(found.trainer) == ["GPU-4"]
    assert place(slots(4, 4, 4), 2, 1, replicas=2) is None, "slots of one GPU are no two GPUs"
    alone = place(slots(1, 1, 1), 2, 1)
    assert alone is not None
    assert alone.replica_numbers == [None, None]


@pytest.mark.parametrize(
    ("free", "servers", "trainers"), [((), 1, 1), ((1,), 1, 1), ((4,), 1, 2), ((4,), 2, 1), ((0, 1), 1, 1)]
)
def test_what_does_not_fit_gets_nothing(free: tuple[int, ...], servers: int, trainers: int) -> None:
    assert place(slots(*free), servers, trainers) is None


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(1, 3), st.integers(1, 3))
def test_nothing_is_given_twice_and_no_kind_is_twice_on_a_gpu(free: list[int], servers: int, trainers: int) -> None:
    offered = slots(*free)
    found = place(offered, servers, trainers)
    if found is None:
        return
    assert (len(found.server), len(found.trainer)) == (servers, trainers)
    assert len(set(found.slots)) == servers + trainers
    assert set(found.slots) <= set(offered)
    for kind in (found.server, found.trainer):
        assert len(set(gpus(kind))) == len(kind)


def test_ranks_are_in_the_order_in_which_they_push() -> None:
    assert trainer_order(["a", "b", "c"], server=["a"]) == ["b", "c", "a"]
    assert trainer_order(["a"], server=["a"]) == ["a"]
