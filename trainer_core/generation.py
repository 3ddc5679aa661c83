"""The trainer's end of generation: started when model and optimizer stand, stopped when training ends.

Only the leading rank has one. What it joins: the rollout worker (a process), the servers' weights, the sample queue and the
planner that makes rows of samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer_core.config import AsyncGRPOConfig
from trainer_core.intake import CONTROL_FILE, POLL_S, SampleIntake
from trainer_core.report import StepReport
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.worker import RolloutWorker
from trainer_core.step_plan import StepPlanner
from trainer_core.sync import ServerUnreachable, WeightSync, choose_sync
from trainer_core.sync.gathering import Summon
from trainer_core.weights import ServerLink, look_at_server


def check_picklable(worker_arguments: dict[str, Any]) -> None:
    """Raises TypeError that names what cannot be sent to the worker process."""
    RolloutWorker(**worker_arguments, state=None).check_picklable()


class Generation:
    """Has no effect until `open`. `worker_arguments` are those of RolloutWorker but for its state."""

    def __init__(
        self,
        worker_arguments: dict[str, Any],
        *,
        config: AsyncGRPOConfig,
        model: Any,
        state: RolloutState,
        prompts_wanted: float,
        pair_cost: float,
        report: StepReport,
        event: Callable[..., None],
    ) -> None:
        self.served_dtype: str | None = None
        self.sync: Any = None
        self.worker = RolloutWorker(**worker_arguments, state=state)
        self._config, self._model, self._state = config, model, state
        self._report, self._event = report, event
        self.intake = SampleIntake(
            self.worker,
            state=state,
            max_staleness=config.max_staleness,
            prompts_wanted=prompts_wanted,
            control_path=config.attempt_path / CONTROL_FILE,
            add=report.add,
            event=event,
            server_back=self._server_back,
        )
        self.planner = StepPlanner(config=config, intake=self.intake, report=report, pair_cost=pair_cost, event=event)

    def open(self, *, resumed: bool, attention: str, summon: Summon | None) -> None:
        """Connect to the servers and start the worker; of a resumed run bring the servers up to date as well.

        `attention` is the trainer's backend, for the event that training has started.
        `summon` calls the other ranks to gather a sharded model; None when it is whole.
        """
        config = self._config
        self.served_dtype = look_at_server(config, self._event)
        self.sync = self._connect(summon)
        self._event(
            "info", "started", f"Training started; attention runs on {attention}.", resumed=resumed, attention=attention
        )
        self._link = ServerLink(
            config=config,
            sync=self.sync,
            model=self._model,
            version=lambda: self._state.weight_version,
            send=self.worker.send,
            report=self._report,
            event=self._event,
        )
        self.worker.start()
        if resumed:  # generation waits for this: the servers hold the weights of the beginning
            self.push()

    def _connect(self, summon: Summon | None) -> WeightSync:
        """Wait also for a server that dies just now: whoever started it starts it again."""
        config, end = self._config, time.monotonic() + self._config.vllm_server_timeout
        while True:
            try:
                sync = choose_sync(config=config, model=self._model, server_urls=config.server_urls, summon=summon)
                sync.open()
                return sync
            except ServerUnreachable as error:
                if time.monotonic() > end:
                    raise
                print(f"waiting for a server: {error}", flush=True)
            time.sleep(POLL_S)

    def push(self) -> None:
        """Give the servers the current weights. A server that died is waited for, until an order to stop comes."""
        self._link.push(self._not_stopped)

    def stop(self) -> None:
        """End the worker, take what it had still to tell, and leave the servers."""
        self.worker.stop()
        self.intake.take_late()
        if self.sync is not None:
            self.sync.close()

    def _server_back(self, url: str) -> None:
        self._link.server_back(url, self._not_stopped)

    def _not_stopped(self) -> bool:
        self.intake.poll()
        return self.intake.order is None
