"""What ranks tell one another, how a failed push keeps them in step, and how FSDP is set up; all in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin

from trainer_core import distributed, distributed_fsdp
from trainer_core.distributed import RankLost, Ranks
from trainer_core.sync.base import together
from trainer_core.sync.gathering import AHEAD, Relay
from trainer_core.sync.server_api import WeightSyncError
from trainer_core.sync.weights import ServedWeight


@pytest.fixture
def pair() -> Iterator[tuple[Ranks, Ranks]]:
    one, other = Pipe()
    here = distributed.host_name()
    ranks = Ranks(0, 2, [(1, here, one)], 600.0), Ranks(1, 2, [(0, here, other)], 600.0)  # type: ignore[list-item]
    yield ranks
    for end in ranks:
        end.close()


def test_a_rank_gets_its_own_value_after_what_it_is_called_for(pair: tuple[Ranks, Ranks]) -> None:
    leader, other = pair
    calls: list[Any] = []
    found: list[Any] = []
    follower = threading.Thread(target=lambda: found.append(other.follow({"gather": calls.append})))
    follower.start()
    leader.call("gather", "full")
    leader.call("gather", "adapter")
    assert leader.give(["for rank 0", "for rank 1" * 1000]) > 10_000
    follower.join(30)
    assert (calls, found) == (["full", "adapter"], ["for rank 1" * 1000])

    other.hand_in({"loss": 2.0})
    assert leader.collect({"loss": 1.0}, 30.0) == [{"loss": 1.0}, {"loss": 2.0}]
    leader.release()
    assert other.follow({}) is None


def test_a_rank_that_does_not_hand_in_is_named(pair: tuple[Ranks, Ranks]) -> None:
    with pytest.raises(RankLost, match="trainer rank 1 did not finish its part within 0 s"):
        pair[0].collect(None, 0.1)


def test_one_process_is_alone() -> None:
    ranks = Ranks(0, 1, [], 1.0)
    assert ranks.give(["own"]) == 0
    assert ranks.collect("own", 1.0) == ["own"]
    ranks.call("gather", "full")
    ranks.release()
    ranks.fail(ValueError("x"), "x")
    ranks.close()


def weights(count: int, made: list[int]) -> list[ServedWeight]:
    def make(index: int) -> torch.Tensor:
        made.append(index)
        return torch.full((3,), float(index))

    return [ServedWeight(str(index), (3,), lambda index=index: make(index)) for index in range(count)]  # type: ignore[misc]


def test_tensors_are_gathered_in_order_on_the_calling_thread_and_sent_from_another() -> None:
    made: list[int] = []
    summoned: list[str] = []
    relay = Relay(weights(20, made), torch.bfloat16, None, lambda: summoned.append(threading.current_thread().name))
    sent: list[torch.Tensor] = []
    senders: set[str] = set()

    def send() -> None:
        for tensor in relay:
            senders.add(threading.current_thread().name)
            sent.append(tensor)

    together("sending", 30.0, [send], meanwhile=relay.gather)
    assert summoned == [threading.current_thread().name]
    assert senders == {"weight-push"}
    assert made == list(range(20))
    assert [float(tensor[0]) for tensor in sent] == list(range(20))
    assert {tensor.dtype for tensor in sent} == {torch.bfloat16}


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_push_that_fails_in_the_middle_gathers_to_the_end(how: str) -> None:
    """The other ranks gather all weights; stopping short would leave them waiting for this one."""
    made: list[int] = []
    relay = Relay(weights(5 * AHEAD, made), torch.float32, None, lambda: None)
    over = threading.Event()

    def send() -> None:
        for number, _ in enumerate(relay):
            if number == 2:
                if how == "raises":
                    raise RuntimeError("the server is gone")
                over.wait(30)
                return

    with pytest.raises(
        (RuntimeError, WeightSyncError), match="the server is gone" if how == "raises" else "took longer"
    ):
        together("sending", 1.0, [send], meanwhile=relay.gather)
    over.set()
    assert made == list(range(5 * AHEAD))


def settings(**more: Any) -> Any:
    return SimpleNamespace(**{"bf16": True, "fp16": False, "fsdp": True, **more})


def test_log_probabilities_are_not_rounded_and_gradients_are_reduced_in_float32() -> None:
    """accelerate's own policy would round what a layer returns, scores included, to the 16 bits it computes in."""
    made = distributed_fsdp.plugin(settings(), FullyShardedDataParallelPlugin(fsdp_version=2))
    made.set_mixed_precision("bf16")  # accelerate does so after us
    policy: Any = made.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert "SHARDED" in str(made.state_dict_type)
    policy = distributed_fsdp.plugin(settings(bf16=False), FullyShardedDataParallelPlugin(fsdp_version=2))
    assert policy.mixed_precision_policy.param_dtype is None


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="FSDP version 1 is not supported; set fsdp_version to 2"):
        distributed_fsdp.plugin(settings(), FullyShardedDataParallelPlugin(fsdp_version=1))
    lazy = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    with pytest.raises(NotImplementedError, match="fsdp_cpu_ram_efficient_loading is not supported"):
        distributed_fsdp.plugin(settings(), lazy)
