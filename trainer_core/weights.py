"""Keeping the servers' weights current, also when servers die and come back in the middle of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer_core.config import AsyncGRPOConfig
from trainer_core.intake import POLL_S, REPORT_EVERY_S
from trainer_core.report import StepReport
from trainer_core.rollout.messages import ServersAway, ServersReady, WeightsPushed
from trainer_core.sync import ServerUnreachable, WeightSync, WeightSyncError
from trainer_core.sync.server_api import ServerApi

MOST_PUSHES = 4
"""Pushes that may fail in a row, each to servers that said they were well, since one of them was gone."""
MOST_REFUSALS = 2
"""The same, since the servers would not take them."""


class ServerLink:
    """Pushes weights and tells the rollout worker about it. `version` is asked for at each push."""

    def __init__(
        self,
        *,
        config: AsyncGRPOConfig,
        sync: WeightSync,
        model: Any,
        version: Callable[[], int],
        send: Callable[[Any], None],
        report: StepReport,
        event: Callable[..., None],
    ) -> None:
        self._config = config
        self._sync = sync
        self._model = model
        self._version = version
        self._send = send
        self._report = report
        self._event = event
        self._urls = [url.rstrip("/") for url in config.server_urls]
        self._lost: set[str] = set()
        self._recovering = False

    def push(self, keep_waiting: Callable[[], bool]) -> None:
        """Give the servers the current weights, and the worker the news.

        Goes on without a server that died, and waits while none answers: `keep_waiting` is called every second, and ends the
        wait when it says no. A server that refuses the weights may have died and come back since the last push, so it is
        connected again too. Raises ServerUnreachable after vllm_server_timeout, or WeightSyncError when pushes go on failing.
        """
        try:
            report = self._sync.push(self._model, self._version())
        except WeightSyncError as error:
            self._note(error)
            self._recover(keep_waiting)
            return
        self._report.add("perf/weight_sync_pause_s", report.pause_s)
        self._report.add("perf/weight_sync_transfer_s", report.transfer_s)
        for name, seconds in report.phases.items():
            self._report.add(f"perf/weight_sync_{name}_s", seconds)
        self._announce()

    def server_back(self, url: str, keep_waiting: Callable[[], bool]) -> None:
        """A server was restarted with the base weights: connect again, push the current ones, let generation go on."""
        self._lost.add(url)
        if not self._recovering:  # a search that is under way finds it
            self._recover(keep_waiting)

    def _announce(self) -> None:
        version = self._version()
        self._send(WeightsPushed(version, self._sync.model_name(version)))

    def _note(self, error: WeightSyncError) -> None:
        """Tell of a failed push whose cause will be looked for."""
        if isinstance(error, ServerUnreachable):
            self._lose(error)
        else:
            print(f"a weight push failed, connecting anew: {error}", flush=True)

    def _lose(self, error: ServerUnreachable) -> None:
        """Tell of a server that the push found gone, once; the worker may not have noticed."""
        if error.url not in self._lost:
            self._lost.add(error.url)
            text = str(error)
            self._event("warning", "server_lost", f"{text[:1].upper()}{text[1:]}.", url=error.url)

    def _recover(self, keep_waiting: Callable[[], bool]) -> None:
        """Bring the servers that answer up to date, and tell the worker which they are."""
        self._recovering = True
        try:
            away = self._restore(keep_waiting)
        finally:
            self._recovering = False
        if away is None:
            return
        for url in away:
            self._lose(ServerUnreachable(url, f"the server at {url} does not answer; the others go on"))
        if away:
            self._send(ServersAway(away))
        self._announce()
        self._send(ServersReady([url for url in self._urls if url not in away]))
        for url in sorted(self._lost.difference(away)):
            self._event("info", "server_back", f"The server at {url} is back and has the current weights.", url=url)
        self._lost = set(away)

    def _restore(self, keep_waiting: Callable[[], bool]) -> list[str] | None:
        """Connect to the servers that answer, once any does, and push. URLs of the others; None when the wait was ended."""
        since = reported = time.monotonic()
        pushes = refusals = 0
        while True:
            try:
                away = self._sync.reopen()
                since, pushes = time.monotonic(), pushes + 1
                self._sync.push(self._model, self._version())
                return away
            except WeightSyncError as error:
                self._note(error)
                refusals += not isinstance(error, ServerUnreachable)
                if pushes == MOST_PUSHES or refusals == MOST_REFUSALS:
                    raise
                url, now = getattr(error, "url", self._urls[0]), time.monotonic()
            if now - since > self._config.vllm_server_timeout:
                raise ServerUnreachable(url, f"the server at {url} did not come back within {now - since:.0f} s")
            if now - reported >= REPORT_EVERY_S:
                reported = now
                print(f"waiting for the server at {url}, {now - since:.0f} s", flush=True)
            time.sleep(POLL_S)
            if not keep_waiting():
                return None


def look_at_server(config: AsyncGRPOConfig, event: Callable[..., None]) -> str:
    """Wait until the servers are ready; take the row budget from the first if none is set; warn when its dtype differs.

    Returns the name of the dtype it serves. Raises WeightSyncError when one is not ready within vllm_server_timeout.
    """
    servers = [ServerApi(url, config.request_timeout) for url in config.server_urls]
    try:
        for server in servers:
            server.wait_until_healthy(config.vllm_server_timeout)
        info = servers[0].info()
    finally:
        for server in servers:
            server.close()
    if config.token_budget is None:
        config.token_budget = info.max_model_len
    computed = config.compute_dtype
    if info.dtype != computed:
        event(
            "warning",
            "dtype_differs",
            f"The server generates in {info.dtype} and the trainer computes in {computed}, so their probabilities differ.",
        )
    return info.dtype
