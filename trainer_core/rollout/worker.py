"""The rollout worker: a process beside the trainer that keeps the servers busy and scores what comes back."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from datasets import Dataset

from trainer_core.rewards import RewardFunction
from trainer_core.rollout.link import Heartbeat, Outbox, QueuedSample, SampleTaken, TrainerWaits, receive
from trainer_core.rollout.loop import AsyncRolloutLoop, LoopSetup
from trainer_core.rollout.messages import Stop, WorkerFailed
from trainer_core.rollout.reward_pool import RewardPool
from trainer_core.rollout.reward_process import Zygote, die_with_parent
from trainer_core.rollout.signatures import check_described, check_environment, check_rewards, check_scored
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.streams import column_names, is_stream
from trainer_core.rollout.tools import Tool, tool_table
from trainer_core.rollout.types import RolloutSample

STOP_GRACE_S = 5.0
STARTUP_S = 300.0
WAIT_REPORT_S = 1.0


class RolloutWorkerError(RuntimeError):
    """The rollout worker is gone; the text is one sentence for people, `details` the worker's traceback if it sent one."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


@dataclass
class Job:
    """Everything that crosses to the worker process, pickled."""

    config: Any
    loop_cls: type[AsyncRolloutLoop]
    model_path: str
    train_dataset: Any
    reward_funcs: list[RewardFunction]
    reward_weights: list[float]
    tools: list[Tool]
    environment_factory: Callable[[], Any] | None
    rollouts_path: Path | None
    state: RolloutState
    samples_per_step: int
    eval_dataset: Any


@dataclass(order=True)
class _Entry:
    order: int
    arrival: int
    sample: RolloutSample = field(compare=False)


class RolloutWorker:
    """The trainer's handle of the worker process.

    The worker dispatches until the staleness bound holds it, so samples wait here in the order in which their groups were
    dispatched: `get` gives the oldest. A resumed state (prompts done, or a weight version above 0) makes the worker wait for
    the first `WeightsPushed`, since the server it finds has the weights of the beginning.

    Call `start` from the main thread: the kernel kills the worker when the thread that started it ends.
    """

    def __init__(
        self,
        *,
        config: Any,
        loop_cls: type[AsyncRolloutLoop],
        model_path: str,
        train_dataset: Any,
        reward_funcs: Sequence[RewardFunction],
        reward_weights: Sequence[float],
        tools: Sequence[Tool] | None,
        environment_factory: Callable[[], Any] | None,
        rollouts_path: Path | None,
        state: RolloutState | None,
        eval_dataset: Any = None,
    ) -> None:
        state = state if state is not None else RolloutState()
        rows = 0 if is_stream(train_dataset) else len(train_dataset)
        if rows and state.num_rows and state.num_rows != rows:
            raise ValueError(
                f"the checkpoint was made with a dataset of {state.num_rows} rows, this one has {rows}; "
                "resume with the same dataset"
            )
        state.num_rows = rows
        if len(reward_weights) != len(reward_funcs):
            raise ValueError(
                f"{len(reward_weights)} reward weights for {len(reward_funcs)} reward functions; one for each"
            )
        self._heartbeat_stale_after_s = float(config.heartbeat_stale_after_s)
        self._job = Job(
            config, loop_cls, model_path, train_dataset, list(reward_funcs), list(reward_weights), list(tools or []),
            environment_factory, rollouts_path, state, config.samples_per_step, eval_dataset,
        )  # fmt: skip
        self._condition = threading.Condition()
        self._heap: list[_Entry] = []
        self._arrivals = itertools.count()
        self._messages: list[Any] = []
        self._failure: RolloutWorkerError | None = None
        self._closed = False
        self._last_sign = time.monotonic()
        self._started_up = False
        self._process: Any = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def check_picklable(self) -> None:
        """Raise TypeError that names what cannot be sent to the worker process, or called there, before a model is loaded."""
        check_scored(self._job.reward_funcs, self._job.environment_factory, self._job.loop_cls)
        for name, tool in tool_table(self._job.tools).items():
            check_described(name, tool)
        parts: list[tuple[str, Any]] = [
            ("loop_cls", self._job.loop_cls),
            ("environment_factory", self._job.environment_factory),
        ]
        parts += [("reward function", function) for function in self._job.reward_funcs]
        parts += [("tool", tool) for tool in self._job.tools]
        if is_stream(self._job.train_dataset):  # it may hold a generator of the user's
            parts.append(("train_dataset", self._job.train_dataset))
        for kind, value in [*parts, ("args", self._job.config)]:
            try:
                pickle.loads(ForkingPickler.dumps(value))
            # pickling runs arbitrary __reduce__ code
            except Exception as error:
                name = getattr(value, "__qualname__", None) or repr(value)
                raise TypeError(
                    f"{kind} {name} cannot be sent to the rollout process ({error}); use a module-level function, a "
                    "functools.partial of one, or an instance of a module-level class, not a lambda or a closure"
                ) from error
        if is_stream(self._job.train_dataset) or isinstance(self._job.train_dataset, Dataset):
            columns = column_names(self._job.train_dataset)
            check_rewards(self._job.reward_funcs, columns)
            check_environment(self._job.environment_factory, columns)

    def start(self) -> None:
        """Start the process, without a GPU. It dies with this one, however this one dies."""
        context = multiprocessing.get_context("spawn")
        inbound, to_worker = context.Pipe(duplex=False)
        from_worker, outbound = context.Pipe(duplex=False)
        payload = bytes(ForkingPickler.dumps(self._job))
        self._process = context.Process(
            target=_worker_main, args=(payload, inbound, outbound, os.getpid()), name="rollout-worker", daemon=True
        )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            self._process.start()
        finally:
            if visible is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
        inbound.close()
        outbound.close()
        self._outbox = Outbox(to_worker)
        self._last_sign = time.monotonic()
        self._reader = threading.Thread(target=self._read, args=(from_worker,), name="rollout-reader", daemon=True)
        self._reader.start()

    def get(self, timeout: float) -> RolloutSample | None:
        """The next sample; None when none came within `timeout` seconds, or after `stop`.

        Raises RolloutWorkerError as soon as the worker is dead, has failed, or has been silent for too long.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            while True:
                if self._closed:
                    return None
                self._raise_if_gone()
                if self._heap:
                    self._outbox.send(SampleTaken())
                    return heapq.heappop(self._heap).sample
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._outbox.send(TrainerWaits())
                self._condition.wait(min(left, WAIT_REPORT_S))

    def check(self) -> None:
        """Raise RolloutWorkerError when the worker is dead, has failed, or has been silent for too long."""
        with self._condition:
            self._raise_if_gone()

    def send(self, message: Any) -> None:
        """Send a message to the worker; never blocks."""
        self._outbox.send(message)

    def receive(self) -> list[Any]:
        """Messages of the worker since the last call."""
        with self._condition:
            messages, self._messages = self._messages, []
        return messages

    def queue_size(self) -> int:
        """Samples waiting."""
        return len(self._heap)

    def stop(self) -> None:
        """End the process: politely, then by force. Calling it again, or before `start`, does nothing.

        `receive` then gives its last messages.
        """
        if self._process is None or self._closed:
            return
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._outbox.send(Stop())
        self._process.join(STOP_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_GRACE_S)
        self._reader.join(STOP_GRACE_S)
        self._outbox.close(0.1)

    def _raise_if_gone(self) -> None:
        if self._failure is not None:
            raise self._failure
        silent = time.monotonic() - self._last_sign
        allowed = self._heartbeat_stale_after_s if self._started_up else max(STARTUP_S, self._heartbeat_stale_after_s)
        if self._process is not None and silent > allowed:
            raise RolloutWorkerError(
                f"the rollout worker (pid {self.pid}) has given no sign of life for {silent:.0f} s "
                f"(heartbeat_stale_after_s is {self._heartbeat_stale_after_s:.0f}); it hangs"
            )

    def _read(self, connection: Connection) -> None:
        """Thread: take in everything the worker sends, until it is gone."""
        while True:
            try:
                message = receive(connection)
            except (EOFError, OSError):
                break
            with self._condition:
                self._last_sign = time.monotonic()
                if isinstance(message, QueuedSample):
                    heapq.heappush(self._heap, _Entry(message.order, next(self._arrivals), message.sample))
                elif isinstance(message, WorkerFailed):
                    self._failure = RolloutWorkerError(message.text, message.traceback)
                elif isinstance(message, Heartbeat):
                    self._started_up = True
                else:
                    self._messages.append(message)
                self._condition.notify_all()
        self._process.join(STOP_GRACE_S)
        with self._condition:
            if self._failure is None:
                self._failure = RolloutWorkerError(_how_it_ended(self._process.exitcode, self.pid))
            self._condition.notify_all()


def _how_it_ended(exitcode: int | None, pid: int | None) -> str:
    if exitcode is None:
        return f"the rollout worker (pid {pid}) closed its connection"
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
        return f"the rollout worker (pid {pid}) was ended by {name}{hint}"
    return f"the rollout worker (pid {pid}) ended with exit code {exitcode}; the trainer's log has its output"


def _worker_main(payload: bytes, inbound: Connection, outbound: Connection, trainer_pid: int) -> None:
    """The whole life of the worker process."""
    die_with_parent(trainer_pid)
    # Signals sent to the trainer's group are the trainer's to answer: it says Stop, or its death ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    outbox: Outbox | None = None
    try:
        job: Job = pickle.loads(payload)
        zygote = Zygote(job.reward_funcs, close=[inbound.fileno(), outbound.fileno()])  # before the first thread
        outbox = Outbox(outbound)
        asyncio.run(_run(job, zygote, inbound, outbox))
        outbox.close(STOP_GRACE_S)
    # the last place where anything can be said about a failure
    except BaseException as error:  # noqa: BLE001
        outbox = outbox or Outbox(outbound)
        outbox.send(WorkerFailed(_sentence(error), traceback.format_exc()))
        outbox.close(STOP_GRACE_S)
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End now: a tool's thread that hangs must not keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(job: Job, zygote: Zygote, inbound: Connection, outbox: Outbox) -> None:
    from transformers import AutoTokenizer

    outbox.send(Heartbeat())
    tokenizer = AutoTokenizer.from_pretrained(job.model_path, trust_remote_code=job.config.trust_remote_code)
    pool = RewardPool(zygote, job.reward_funcs, job.config.reward_timeout)
    try:
        loop = job.loop_cls(
            LoopSetup(
                job.config, tokenizer, job.train_dataset, job.state, job.samples_per_step, pool, job.reward_weights, job.tools,
                job.environment_factory, job.rollouts_path, outbox,
                eval_rows=job.eval_dataset,
                wait_for_weights=job.state.prompts_done() > 0 or job.state.weight_version > 0,
            )
        )  # fmt: skip
        asyncio.get_running_loop().add_reader(inbound.fileno(), _take_messages, inbound, loop)
        await loop.run()
    finally:
        pool.close()


def _take_messages(inbound: Connection, loop: AsyncRolloutLoop) -> None:
    try:
        while inbound.poll(0):
            loop.handle(receive(inbound))
    except EOFError:
        os._exit(1)  # the trainer is gone
    # an exception in a reader callback would only be logged
    except Exception as error:  # noqa: BLE001
        loop.fail(error)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, RuntimeError | ValueError) else f"{type(error).__name__}: {text}"
