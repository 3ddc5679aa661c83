"""The cap of rollouts in flight, without a server."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_core.rollout.concurrency import ConcurrencyController, ServerSample
from trainer_core.rollout.slots import Slots


def sample(kv: float = 0.3, in_flight: int = 100, finished: int = 0, **values: float) -> ServerSample:
    numbers = {"waiting": 0, "preemptions": 0, "age_s": 0.0, **values}
    return ServerSample(kv_usage=kv, in_flight=in_flight, finished=finished, **numbers)  # type: ignore[arg-type]


def test_starts_at_what_fits() -> None:
    assert ConcurrencyController(100, 45.5).cap == 45
    assert ConcurrencyController(32, 45.5).cap == 32
    assert ConcurrencyController(100, 0.4).cap == 1
    with pytest.raises(ValueError, match="at least 1"):
        ConcurrencyController(0, None)


def test_without_metrics_the_cap_is_the_ceiling() -> None:
    assert ConcurrencyController(100, None).cap == 100


def test_grows_a_quarter_for_each_cap_of_finished_rollouts() -> None:
    controller = ConcurrencyController(100, 40)
    assert controller.observe(sample(in_flight=40, finished=39)) == 40
    assert controller.observe(sample(in_flight=40, finished=40)) == 50
    assert controller.observe(sample(in_flight=50, finished=60)) == 50
    assert controller.observe(sample(in_flight=50, finished=90)) == 62
    for finished in range(200, 1000, 100):
        controller.observe(sample(in_flight=100, finished=finished))
    assert controller.cap == 100


@pytest.mark.parametrize(
    "seen",
    [
        sample(0.6, 40, 99),
        sample(0.7, 40, 99),
        sample(0.3, 40, 99, waiting=1),
        sample(0.3, 35, 99),  # the cap is not what limits
        sample(0.3, 40, 99, age_s=16),
    ],
)
def test_does_not_grow(seen: ServerSample) -> None:
    assert ConcurrencyController(100, 40).observe(seen) == 40


def test_cuts_once_and_waits_until_the_pool_is_under_the_new_cap() -> None:
    controller = ConcurrencyController(100, 100)
    assert controller.observe(sample(0.9, 100)) == 70
    assert controller.observe(sample(0.95, 90)) == 70
    assert controller.observe(sample(0.95, 71)) == 70
    assert controller.observe(sample(0.85, 70)) == 49
    assert controller.observe(sample(0.3, 49, finished=30)) == 49
    assert controller.observe(sample(0.3, 49, finished=49)) == 61


def test_a_preemption_cuts_although_the_cache_looks_fine() -> None:
    controller = ConcurrencyController(100, 100)
    assert controller.observe(sample(0.7, 100, preemptions=3)) == 100
    assert controller.observe(sample(0.7, 100, preemptions=4)) == 70


def test_requests_that_a_weight_push_set_back_do_not_cut() -> None:
    """vLLM counts them as preempted; with a cache that is nearly empty it can't be for lack of room."""
    controller = ConcurrencyController(100, 50)
    for step in range(1, 20):
        controller.observe(sample(0.01, controller.cap, finished=100 * step, preemptions=50 * step))
    assert controller.cap == 100


def test_an_old_look_changes_nothing() -> None:
    controller = ConcurrencyController(100, 100)
    assert controller.observe(sample(0.99, 100, age_s=20)) == 100


@given(
    st.integers(1, 200),
    st.one_of(st.none(), st.floats(0, 500)),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 2), st.integers(0, 300)), max_size=60),
)
def test_the_cap_stays_between_one_and_the_ceiling(
    ceiling: int, start: float | None, looks: list[tuple[float, int, int, int]]
) -> None:
    controller = ConcurrencyController(ceiling, start)
    preemptions = finished = 0
    for kv, waiting, preempted, done in looks:
        preemptions, finished = preemptions + preempted, finished + done
        before = controller.cap
        cap = controller.observe(sample(kv, before, finished, waiting=waiting, preemptions=preemptions))
        assert 1 <= cap <= ceiling
        if kv > 0.8:
            assert cap <= before


@pytest.mark.asyncio
async def test_slots_follow_the_cap_and_forget_the_cancelled() -> None:
    slots = Slots(2)
    order: list[int] = []
    release = asyncio.Event()

    async def hold(number: int) -> None:
        async with slots:
            order.append(number)
            await release.wait()

    tasks = [asyncio.create_task(hold(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert order == [0, 1]
    assert not slots.free
    slots.set_cap(3)
    await asyncio.sleep(0)
    assert order == [0, 1, 2]
    tasks[3].cancel()
    slots.set_cap(1)
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (slots.in_flight, order) == (1, [0, 1, 2])
    tasks[2].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [0, 1, 2, 4]
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 2, 4, 5]
    assert slots.in_flight == 0
    assert slots.free
