"""The same kills with the real vLLM server and the real trainer, on the tiny model: one run, hit again and again."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.workers.conftest import Studio, wait_for
from tests.workers.test_lifecycle import wait_for_state

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(2400)]
TRUTH_S = 30
START_S = 600
SOURCE = '''
def early_letters(prompts, completions, **columns):
    """Share of characters in the first half of the alphabet: a random model varies in it."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(letter in "abcdefghijklm" for letter in text) / (len(text) or 1) for text in texts]
'''


SLOW_SOURCE = SOURCE.replace("    texts =", "    import time\n\n    time.sleep(2)\n    texts =")
"""As version 2: with it 120 steps last longer than a server takes to start, on slow machines too."""


@pytest.fixture
def launch_run(studio: Studio, make_run: Callable[..., Any], tiny_model: Path) -> Callable[..., Any]:
    """Queues a run of `prompts` prompts that saves each second step, with a reward function written in the studio.

    A step trains on two whole groups of two.
    """
    from webapp.accounts.models import User
    from webapp.rewards.models import RewardFunction, RewardVersion

    owner = User.objects.get(username="ann")
    function = RewardFunction.objects.create(name="early_letters", owner=owner)
    for number, code in ((1, SOURCE), (2, SLOW_SOURCE)):
        RewardVersion.objects.create(function=function, number=number, source=code, created_by=owner)

    def launch(prompts: int, max_steps: int, ranks: int = 1, servers: int = 1, reward_version: int = 1) -> Any:
        source = studio.home / "prompts.jsonl"
        source.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(prompts)))
        return make_run(
            "real", model={"path": str(tiny_model)}, data={"source": str(source)},
            rewards=[{"name": "early_letters", "version": reward_version}],
            rollout={"num_generations": 2, "max_completion_length": 12, "max_staleness": 2},
            training={
                "max_steps": max_steps, "learning_rate": 1e-4, "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2 // ranks, "bf16": False, "gradient_checkpointing": False,
            },
            lora={"r": 4, "alpha": 8},
            server={"max_model_len": 256, "dtype": "float32", "kv_cache_gib": 0.0625, "max_num_seqs": 16},
            checkpoints={"save_steps": 2, "save_total_limit": 3},
            resources={"cpu_ranks": ranks, "server_replicas": servers},
        )  # fmt: skip

    return launch


def step_of(run: Any) -> int:
    from webapp.metrics.models import Series

    series = Series.objects.filter(attempt=run.current_attempt, name="loss").first()
    return series.last_step if series and series.last_step is not None else 0


def wait_for_steps(run: Any, count: int, seconds: float = START_S) -> int:
    """Wait until the current attempt has made `count` more steps; returns the step reached."""
    begin = step_of(run)

    def advanced() -> bool:
        run.refresh_from_db()
        assert run.state in ("queued", "starting", "running"), f"{run.state}: {run.reason}"
        return step_of(run) >= begin + count

    wait_for(advanced, f"{count} steps after {begin}", seconds)
    return step_of(run)


def assert_clean(studio: Studio, attempt: Any, shared_memory: set[str]) -> None:
    from webapp.hosts.models import Lease, PortLease

    left = {(process.pid, " ".join(process.cmdline())[:100]) for process in studio.marked(attempt)}
    assert left == set()
    assert not Lease.objects.filter(attempt=attempt).exists()
    assert not PortLease.objects.filter(attempt=attempt).exists()
    assert {path for path in shared_memory if Path(path).exists()} == set()


def blocks_of(studio: Studio, attempt: Any) -> set[str]:
    """Shared-memory blocks that the attempt's processes have mapped now, read from their maps."""
    return {
        region.path
        for process in studio.marked(attempt)
        for region in process.memory_maps()
        if region.path.startswith("/dev/shm/psm_")
    }


def titled(studio: Studio, attempt: Any, title: str) -> psutil.Process:
    (found,) = [process for process in studio.marked(attempt) if " ".join(process.cmdline()).startswith(title)]
    return found


def has_rank(trainer: psutil.Process, rank: int) -> bool:
    """Whether it is the trainer process of that rank, and not what launched it."""
    return "accelerate" not in " ".join(trainer.cmdline()) and int(trainer.environ().get("RANK", 0)) == rank


def kill_and_see_restart(studio: Studio, run: Any, victim: psutil.Process) -> None:
    """The server comes back on its port, the trainer stays, and steps go on."""
    attempt = run.current_attempt
    trainer = studio.program(attempt, "trainer_core.launch --spec")
    restarts = attempt.server_restarts
    old = {process.pid for process in studio.programs(attempt, "vllm.entrypoints")}
    victim.kill()

    def restarted() -> bool:
        attempt.refresh_from_db()
        return attempt.server_restarts == restarts + 1

    wait_for(restarted, "the restart", TRUTH_S)
    assert not old & {process.pid for process in studio.programs(attempt, "vllm.entrypoints")}
    wait_for_steps(run, 3)
    assert trainer.is_running()


@pytest.mark.parametrize(("ranks", "prompts"), [(1, 28), (2, 16)])
def test_a_killed_and_resumed_run_does_each_prompt_of_the_epoch_once(
    studio: Studio, launch_run: Callable[..., Any], ranks: int, prompts: int
) -> None:
    """As many steps as the epoch has pairs of prompts: a repeated prompt would leave another one out.

    Of two FSDP2 ranks the one that does not lead is killed.
    """
    from trainer_core.rollout.state import RolloutState
    from webapp.runs.lifecycle import resume

    run = launch_run(prompts, max_steps=prompts // 2, ranks=ranks)
    studio.start_worker("workers.tasks")
    studio.start_beat("workers.tasks")
    wait_for_steps(run, 1)
    attempt = run.current_attempt
    blocks = blocks_of(studio, attempt)  # it takes a while, in which steps are made
    trainers = [each for each in studio.programs(attempt, "trainer_core.launch --spec") if has_rank(each, ranks - 1)]
    assert len(trainers) == 1
    wait_for_steps(run, max(0, (5 if ranks == 1 else 3) - step_of(run)))
    trainers[0].kill()
    wait_for_state(run, "failed", seconds=TRUTH_S)
    assert ranks > 1 or "killed by signal 9" in run.reason
    wait_for(lambda: not studio.marked(attempt), "the supervisor's end", 10)
    assert_clean(studio, attempt, blocks)
    state_file = run.checkpoints.order_by("-step").first().folder / "rollout_state.json"
    saved = RolloutState.from_json(state_file.read_text())
    assert 0 < saved.prompts_done() < prompts

    resume(run, None)
    wait_for_state(run, "completed", seconds=START_S)
    last = run.checkpoints.order_by("-attempt__number", "-step").first()
    state = RolloutState.from_json((last.folder / "rollout_state.json").read_text())
    assert last.step == prompts // 2
    assert state.done(0) > saved.done(0)
    assert state.done(0) == set(range(prompts))
    # Groups whose rewards are equal are dropped and count as done, so the next epoch may have begun; nothing else may.
    dropped = state.prompts_done() - prompts
    assert len(state.done(1)) == dropped
    assert dropped < prompts // 2


def test_kills_of_real_parts(studio: Studio, launch_run: Callable[..., Any]) -> None:
    """Engine, API server, worker and supervisor; the trainer's kill is in the test above."""
    from webapp.runs.lifecycle import resume, stop

    run = launch_run(500, max_steps=100_000)
    worker = studio.start_worker("workers.tasks")
    studio.start_beat("workers.tasks")
    wait_for_steps(run, 3)
    attempt = run.current_attempt
    assert run.state == "running"

    kill_and_see_restart(studio, run, titled(studio, attempt, "VLLM::EngineCore"))
    kill_and_see_restart(studio, run, studio.program(attempt, "vllm.entrypoints"))

    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(5)
    wait_for_steps(run, 2)
    studio.start_worker("workers.tasks")

    blocks = blocks_of(studio, attempt)
    studio.program(attempt, "workers.supervisor").kill()
    wait_for_state(run, "failed", seconds=TRUTH_S)
    assert "supervisor was killed" in run.reason
    assert_clean(studio, attempt, blocks)

    saved = run.checkpoints.order_by("-step").first().step
    resume(run, None)
    wait_for_steps(run, 3)
    attempt = run.current_attempt
    assert attempt.number == 2
    first_step = attempt.events.get(name="first_step").step
    assert first_step == saved + 1

    blocks = blocks_of(studio, attempt)
    stop(run, None, save=True)
    wait_for_state(run, "stopped", seconds=60)
    assert run.reason == "Saved a checkpoint and stopped."
    wait_for(lambda: not studio.marked(attempt), "the supervisor's end", 5)
    assert_clean(studio, attempt, blocks)
    last = run.checkpoints.order_by("-attempt__number", "-step").first()
    assert (last.attempt, last.folder.is_dir()) == (attempt, True)


def requests_served(server: Any) -> float:
    """What the process that listens there now has finished since it was started."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10, trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total{"))


def test_of_two_servers_one_is_killed_and_the_run_goes_on_with_the_other(
    studio: Studio, launch_run: Callable[..., Any]
) -> None:
    """Steps are made while it starts again, then it serves again, and each prompt of the epoch is done once."""
    from trainer_core.rollout.state import RolloutState

    prompts = 240
    run = launch_run(prompts, max_steps=prompts // 2, servers=2, reward_version=2)
    studio.start_worker("workers.tasks")
    studio.start_beat("workers.tasks")
    wait_for_steps(run, 3)
    attempt = run.current_attempt
    first, second = attempt.servers.order_by("number")
    assert [server.state for server in (first, second)] == ["ready", "ready"]
    assert {server.url for server in (first, second)} == {
        f"http://127.0.0.1:{lease.port}" for lease in attempt.ports.all()
    }
    assert all(requests_served(server) > 0 for server in (first, second))
    blocks = blocks_of(studio, attempt)
    survivor, victim = (studio.program(attempt, f"--port {server.port} ") for server in (first, second))
    victim.kill()
    back = wait_for(
        lambda: attempt.events.filter(name="server_back", data__url=second.url).first(), "the server's return", START_S
    )
    lost = attempt.events.filter(name="server_lost").first()
    assert lost.data["url"] == second.url
    assert back.step > lost.step, "the other one kept the run going"
    wait_for(lambda: requests_served(second) > 0, "a request to the new process", 120)
    assert survivor.is_running()
    second.refresh_from_db()
    assert (second.state, second.restarts) == ("ready", 1)
    blocks |= blocks_of(studio, attempt)

    wait_for_state(run, "completed", seconds=START_S)
    attempt.refresh_from_db()
    assert attempt.server_restarts == 1
    assert set(attempt.servers.values_list("state", flat=True)) == {"ended"}
    last = run.checkpoints.order_by("-step").first()
    state = RolloutState.from_json((last.folder / "rollout_state.json").read_text())
    assert (last.step, state.done(0)) == (prompts // 2, set(range(prompts)))
    assert len(state.done(1)) == state.prompts_done() - prompts
    groups = Counter((data["row_index"], data["epoch"]) for data in run.rollouts.values_list("data", flat=True))
    assert set(groups.values()) == {2}, "each prompt has its two rollouts, and no rollout is there twice"
    wait_for(lambda: not studio.marked(attempt), "the supervisor's end", 30)
    assert_clean(studio, attempt, blocks)
