"""The worker process: against the fault injector, and against the real server."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from aiohttp import web

from tests.trainer_core.rollout.conftest import first_token, prompts
from tests.trainer_core.rollout.mini_trainer import config_for
from tests.trainer_core.rollout.stub_server import StubServer
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.messages import GroupConsumed, WeightsPushed, WorkerMetrics
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.types import Rollout
from trainer_core.rollout.worker import RolloutWorker, RolloutWorkerError

if TYPE_CHECKING:
    from tests.vllm_server import RunningServer

# A worker imports torch and transformers, which a machine with much else to do takes a minute for.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 240


def visible_gpus(completions: list[Any], **columns: Any) -> list[float]:
    """Says in its rewards whether a GPU could be seen."""
    return [float(os.environ["CUDA_VISIBLE_DEVICES"] == "") + index for index in range(len(completions))]


def worker(config: Any, model: Path, **changes: Any) -> RolloutWorker:
    arguments: dict[str, Any] = {
        "config": config, "loop_cls": AsyncRolloutLoop, "model_path": str(model), "train_dataset": prompts(20),
        "reward_funcs": [first_token], "reward_weights": [1.0], "tools": None, "environment_factory": None,
        "rollouts_path": None, "state": None, **changes,
    }  # fmt: skip
    return RolloutWorker(**arguments)


@contextmanager
def started(handle: RolloutWorker) -> Iterator[RolloutWorker]:
    handle.start()
    try:
        yield handle
    finally:
        handle.stop()


def wait_until(condition: Callable[[], bool], within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def documented(number: int) -> int:
    """Doubles.

    Args:
        number: A number.
    """
    return 2 * number


def takes_too_little(completions: list[Any]) -> list[float]:
    return []


def wants_more(completions: list[Any], gold: list[str], **columns: Any) -> list[float]:
    return []


class Closed:
    """No environment: nothing opens it."""


class Narrow:
    def reset(self, number: int) -> None: ...


class Mute:
    def reset(self, **row: Any) -> None: ...

    def look(self, where):  # type: ignore[no-untyped-def]
        return where


class Scores:
    def reset(self, **row: Any) -> None: ...

    def get_reward(self) -> float:
        return 1.0


class Own(AsyncRolloutLoop):
    async def generate_one(self, row_index: int, row: dict[str, Any], epoch: int) -> Rollout:
        raise NotImplementedError


class TestCheckPicklable:
    @pytest.mark.parametrize(
        "changes, text",
        [
            (
                {"reward_funcs": [lambda completions: [1.0]]},
                r"reward function .*<lambda> cannot be sent to the rollout process",
            ),
            ({"tools": [functools.partial(documented, 1)]}, r"has no __name__"),
            ({"tools": [first_token]}, r"the tool first_token cannot be described to the model"),
            ({"environment_factory": lambda: None}, r"environment_factory .*<lambda> cannot be sent"),
            (
                {"reward_funcs": [takes_too_little]},
                r"reward function takes_too_little cannot be called with prompts, completions, completion_ids, number "
                r"\(got an unexpected keyword argument 'prompts'\); take what it does not need as \*\*columns",
            ),
            (
                {"reward_funcs": [functools.partial(wants_more)]},
                r"wants_more .* \(missing a required argument: 'gold'\)",
            ),
            (
                {"environment_factory": Narrow},
                r"reset of environment Narrow cannot be called with the dataset's columns prompt, number \(got an unexpected "
                r"keyword argument 'prompt'\); take what it does not need as \*\*row",
            ),
            ({"environment_factory": functools.partial(Mute)}, r"the tool Mute.look cannot be described to the model"),
            ({"environment_factory": Closed}, r"environment Closed has no reset"),
            ({"environment_factory": Closed()}, r"environment_factory is a Closed; a class, or a function"),
            ({"loop_cls": Closed}, r"loop_cls is .*Closed.*; a subclass of AsyncRolloutLoop is needed"),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, tmp_path: Path, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(TypeError, match=text):
            worker(config_for("http://127.0.0.1:9", tmp_path), tmp_path, **changes).check_picklable()

    def test_something_must_score(self, tmp_path: Path) -> None:
        config = config_for("http://127.0.0.1:9", tmp_path)
        nothing: dict[str, Any] = {"reward_funcs": [], "reward_weights": []}
        for factory in (None, Mute):
            with pytest.raises(ValueError, match="nothing scores the rollouts; give reward_funcs, an environment with"):
                worker(config, tmp_path, environment_factory=factory, **nothing).check_picklable()
        worker(config, tmp_path, environment_factory=Scores, **nothing).check_picklable()
        worker(config, tmp_path, loop_cls=Own, **nothing).check_picklable()

    def test_a_closure_is_named(self, tmp_path: Path) -> None:
        def close_over(completions: list[Any]) -> list[float]:
            return [float(len(str(tmp_path)))] * len(completions)

        with pytest.raises(
            TypeError, match=r"close_over cannot be sent.*module-level function.*not a lambda or a closure"
        ):
            worker(config_for("http://127.0.0.1:9", tmp_path), tmp_path, reward_funcs=[close_over]).check_picklable()

    def test_the_usual_things_pass(self, tmp_path: Path) -> None:
        partial = functools.partial(first_token, unused=1)
        config = config_for("http://127.0.0.1:9", tmp_path)
        worker(config, tmp_path, reward_funcs=[partial], tools=[documented]).check_picklable()
        assert pickle.loads(pickle.dumps(config)).samples_per_step == 8

    def test_another_dataset_length_is_refused_on_resume(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="made with a dataset of 7 rows, this one has 20"):
            worker(config_for("http://127.0.0.1:9", tmp_path), tmp_path, state=RolloutState(num_rows=7))


def test_a_worker_that_is_killed_is_noticed_at_once(server: StubServer, tiny_model: Path, tmp_path: Path) -> None:
    with started(worker(config_for(server.url, tmp_path, max_staleness=0), tiny_model)) as handle:
        assert handle.get(START_S) is not None
        assert handle.pid is not None
        family = psutil.Process(handle.pid).children(recursive=True)
        assert len(family) >= 2  # the zygote and a reward process
        for _ in range(7):
            assert handle.get(10) is not None
        killed = time.monotonic()
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(
            RolloutWorkerError, match=r"was ended by SIGKILL; the kernel does that when memory runs out"
        ):
            handle.get(30)
        assert time.monotonic() - killed < 3
        assert wait_until(lambda: not any(alive(process) for process in family))
        with pytest.raises(RolloutWorkerError):
            handle.get(1)


def test_a_worker_that_hangs_is_noticed(server: StubServer, tiny_model: Path, tmp_path: Path) -> None:
    with started(
        worker(config_for(server.url, tmp_path, heartbeat_stale_after_s=2.5, max_staleness=0), tiny_model)
    ) as handle:
        for _ in range(8):
            assert handle.get(START_S) is not None
        assert wait_until(lambda: bool(handle.receive())), "the first report comes with the first heartbeat"
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGSTOP)
        with pytest.raises(
            RolloutWorkerError, match=r"no sign of life for \d+ s \(heartbeat_stale_after_s is 2\); it hangs"
        ):
            handle.get(30)


def test_no_server_is_one_sentence(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for("http://127.0.0.1:9", tmp_path, vllm_server_timeout=1.0)
    with started(worker(config, tiny_model)) as handle:
        with pytest.raises(RolloutWorkerError, match=r"server at http://127.0.0.1:9 was not ready within") as caught:
            handle.get(START_S)
        assert "Traceback" in caught.value.details


def test_the_queue_is_bounded_and_signals_are_left_to_the_trainer(
    server: StubServer, tiny_model: Path, tmp_path: Path
) -> None:
    config = config_for(server.url, tmp_path, queue_maxsize=5, max_staleness=4)
    with started(worker(config, tiny_model, reward_funcs=[visible_gpus])) as handle:
        assert wait_until(lambda: handle.queue_size() == 5, START_S)
        time.sleep(1.5)
        assert handle.queue_size() == 5
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGTERM)
        os.kill(handle.pid, signal.SIGINT)
        samples = [handle.get(10) for _ in range(8)]
        assert {sample.reward for sample in samples if sample} <= {1.0, 2.0, 3.0, 4.0}, "a GPU was visible"
        held = sum(
            value for message in handle.receive() if isinstance(message, WorkerMetrics)
            for value in message.values.get("rollout/backpressure_s", []) if isinstance(value, float)
        )  # fmt: skip
        assert held > 0.5
        started_stop = time.monotonic()
        handle.stop()
        assert time.monotonic() - started_stop < 5
        assert handle.get(1) is None
        handle.stop()


def test_a_killed_trainer_takes_everything_along(server: StubServer, tiny_model: Path, tmp_path: Path) -> None:
    server.delay_s = 0.2
    program = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from tests.trainer_core.rollout.test_worker import config_for, worker
        if __name__ == "__main__":
            handle = worker(config_for({server.url!r}, Path({str(tmp_path)!r})), Path({str(tiny_model)!r}))
            handle.start()
            handle.get({START_S})
            print("ready", flush=True)
            time.sleep(100)
    """)
    script = tmp_path / "train.py"
    script.write_text(program)
    root = Path(__file__).resolve().parents[3]
    trainer = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    family = psutil.Process(trainer.pid).children(recursive=True)
    assert len(family) >= 3
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: not any(alive(process) for process in family), 5), family


@pytest.mark.server
def test_samples_of_the_real_server(tiny_server: RunningServer, tiny_model: Path, tmp_path: Path) -> None:
    """Real log-probabilities, real metrics, versions that follow the pushes."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_for(tiny_server.url, tmp_path, score_centering=True, num_sampler_logprobs=4, max_staleness=0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with started(worker(config, tiny_model, rollouts_path=tmp_path / "rollouts.jsonl")) as handle:
        samples = []
        for version in range(3):
            pulled: dict[str, int] = {}
            for _ in range(8):
                sample = handle.get(START_S)
                assert sample is not None
                assert sample.weight_version == version
                samples.append(sample)
                pulled[sample.group_id] = pulled.get(sample.group_id, 0) + 1
                if pulled[sample.group_id] == sample.group_size:
                    handle.send(GroupConsumed(sample.group_id, sample.group_size))
            handle.send(WeightsPushed(version + 1, "policy"))
        assert wait_until(
            lambda: any(isinstance(m, WorkerMetrics) and "vllm/running" in m.values for m in handle.receive())
        )
    for sample in samples:
        ids = torch.tensor(sample.input_ids[None].astype("int64"))
        with torch.no_grad():
            reference = torch.log_softmax(model(ids).logits[0, :-1], -1)
        trained = sample.completion_mask[1:] == 1
        expected = reference.gather(1, ids[0, 1:, None])[:, 0].numpy()[trained]
        assert abs(sample.log_probs[1:][trained] - expected).max() < 1e-3
        assert sample.top_log_probs is not None
        best = reference.topk(4).values.numpy()[trained]
        assert abs(sample.top_log_probs[1:][trained].max(1) - best.max(1)).max() < 1e-3


def test_the_totals_of_the_last_second_arrive(server: StubServer, tiny_model: Path, tmp_path: Path) -> None:
    """Metrics are sent once a second; what was counted when the worker is stopped comes with its end."""

    async def fails(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    server.fault = fails
    with started(worker(config_for(server.url, tmp_path, max_staleness=0), tiny_model)) as handle:
        assert wait_until(lambda: len(server.requests) >= 12, START_S)  # eight rollouts, and four that were asked again
        handle.stop()
        messages = [message for message in handle.receive() if isinstance(message, WorkerMetrics)]
    retries = sum(sum(message.values.get("rollout/vllm_retry_total", [])) for message in messages)  # type: ignore[arg-type]
    assert retries >= len(server.requests) - 8
