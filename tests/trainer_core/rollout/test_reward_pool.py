"""Scoring in real processes: what a reward function does wrong stays in its process."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import psutil

from trainer_core.rewards import RewardFunction
from trainer_core.rewards.sandbox import Limits, SandboxedReward
from trainer_core.rollout.reward_pool import RewardPool, Scores
from trainer_core.rollout.reward_process import Zygote

CALL = {"prompts": ["p", "q"], "completions": ["a", "bb"], "completion_ids": [[1], [2, 3]], "answer": ["x", "y"]}
Result = TypeVar("Result")


def length(completions: list[str], **columns: Any) -> Any:
    return np.array([len(completion) for completion in completions])


async def judged(completions: list[str], **columns: Any) -> list[float | None]:
    await asyncio.sleep(0.2)
    return [None, 0.5]


def scaled(completions: list[str], factor: float, **columns: Any) -> list[float]:
    return [factor * len(completion) for completion in completions]


def scaled_3(completions: list[str], **columns: Any) -> list[float]:
    return [3.0 * len(completion) for completion in completions]


def hangs(completions: list[str], **columns: Any) -> list[float]:
    os.system("sleep 300")
    return []


def raises(completions: list[str], **columns: Any) -> list[float]:
    return [dict[str, float]()["missing"]]


def leaves(completions: list[str], **columns: Any) -> list[float]:
    raise SystemExit(3)


def crashes(completions: list[str], **columns: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def wrong_count(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


def not_a_number(completions: list[str], **columns: Any) -> list[float]:
    return [float("nan"), 1.0]


def text(completions: list[str], **columns: Any) -> list[str]:
    return ["good", "bad"]


def with_pool(
    functions: list[RewardFunction], use: Callable[[RewardPool], Awaitable[Result]], timeout: float = 5.0
) -> Result:
    zygote = Zygote(functions)

    async def run() -> Result:
        pool = RewardPool(zygote, functions, timeout)
        try:
            return await use(pool)
        finally:
            pool.close()

    try:
        return asyncio.run(run())
    finally:
        os.waitpid(zygote.pid, 0)


def score(functions: list[RewardFunction], timeout: float = 5.0) -> list[Scores]:
    return with_pool(functions, lambda pool: pool.score(CALL), timeout)


def test_values_of_functions_partials_and_coroutines() -> None:
    scores = score([length, judged, functools.partial(scaled, factor=10)])
    assert [s.function for s in scores] == ["length", "judged", "scaled"]
    assert [s.values for s in scores] == [[1.0, 2.0], [None, 0.5], [10.0, 20.0]]


def test_functions_that_share_a_name_keep_their_own_metrics() -> None:
    scores = score(
        [functools.partial(scaled, factor=1), functools.partial(scaled, factor=2), length, scaled_3, scaled_3]
    )
    assert [s.function for s in scores] == ["scaled", "scaled_2", "length", "scaled_3", "scaled_3_2"]
    assert [s.values for s in scores[:2]] == [[1.0, 2.0], [2.0, 4.0]]


def test_failures_are_told_apart_and_hurt_nobody_else() -> None:
    scores = score([raises, leaves, crashes, wrong_count, not_a_number, text, length])
    assert [s.failure for s in scores] == ["error"] * 6 + [None]
    assert [s.text for s in scores[:-1]] == [
        "KeyError: 'missing'",
        "SystemExit: 3",
        "crashes ended its process (a crash, or out of memory)",
        "wrong_count returned 1 rewards for 2 completions; one for each is expected",
        "not_a_number returned nan for completion 0; a finite number or None is expected",
        "text returned str 'good' for completion 0; a number or None is expected",
    ]
    assert 'return [dict[str, float]()["missing"]]' in scores[0].traceback
    assert scores[-1].values == [1.0, 2.0]


def test_a_call_that_hangs_is_killed_with_what_it_started() -> None:
    async def use(pool: RewardPool) -> list[list[Scores]]:
        return [await pool.score(CALL), await pool.score(CALL)]

    started = time.monotonic()
    first, second = with_pool([hangs, length], use, timeout=1.0)
    assert time.monotonic() - started < 8
    assert [s.failure for s in first + second] == ["timeout", None] * 2
    assert first[0].text == "hangs took longer than reward_timeout (1 s)"
    assert _gone(lambda process: process.cmdline() == ["sleep", "300"])


def hangs_on_bb(completions: list[str], **columns: Any) -> list[float]:
    if "bb" in completions:
        time.sleep(300)
    return [7.0] * len(completions)


def slow_each(completions: list[str], **columns: Any) -> list[float]:
    time.sleep(0.8 * len(completions))
    return [float(len(text)) for text in completions]


def test_a_completion_that_hangs_costs_no_other_its_score() -> None:
    scores = score([hangs_on_bb, slow_each], timeout=1.2)
    assert [s.failure for s in scores] == ["timeout", "timeout"]
    assert scores[0].values == [7.0, None]
    assert scores[0].failed(2) == [False, True]
    assert scores[0].text == (
        "hangs_on_bb took longer than reward_timeout (1.2 s); scored one by one, 1 of 2 completions failed"
    )
    assert scores[1].values == [1.0, 2.0]
    assert scores[1].failed(2) == [False, False]


def test_groups_are_scored_side_by_side() -> None:
    async def use(pool: RewardPool) -> float:
        started = time.monotonic()
        results = await asyncio.gather(*(pool.score(CALL) for _ in range(8)))
        assert all(scores[0].values == [None, 0.5] for scores in results)
        return time.monotonic() - started

    assert with_pool([judged], use) < 8 * 0.2


def test_processes_are_kept_and_end_with_the_pool() -> None:
    async def use(pool: RewardPool) -> list[int]:
        for _ in range(5):
            await pool.score(CALL)
        return [process.pid for process in pool._all]

    pids = with_pool([length], use)
    assert len(pids) == 1
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=3)
    assert not psutil.pid_exists(pids[0])


def test_a_sandboxed_function_dies_with_its_reward_process() -> None:
    source = "def reward(completions, **columns):\n    while 'bb' in completions: pass\n    return [0.0]"

    async def use(pool: RewardPool) -> list[Scores]:
        return await pool.score(CALL)

    scores = with_pool([SandboxedReward(source, "reward", Limits())], use, timeout=1.5)
    assert scores[0].failure == "timeout"
    assert _gone(lambda process: "trainer_core.rewards.sandbox_child" in process.cmdline() and process.ppid() == 1)


def _gone(matches: Callable[[psutil.Process], bool], within: float = 3.0) -> bool:
    """Whether no such process is alive, or stops being so soon."""
    deadline = time.monotonic() + within
    while any(_matches(process, matches) for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _matches(process: psutil.Process, matches: Callable[[psutil.Process], bool]) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and matches(process)
    except psutil.NoSuchProcess:
        return False
