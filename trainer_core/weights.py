"""Keeping the servers' weights current, also when a server dies and comes back in the middle of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer_core.config import AsyncGRPOConfig
from trainer_core.intake import POLL_S, REPORT_EVERY_S
from trainer_core.report import StepReport
from trainer_core.rollout.messages import ServersReady, WeightsPushed
from trainer_core.sync import ServerUnreachable, WeightSync
from trainer_core.sync.server_api import ServerApi


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
        self._restored = 0

    def push(self, keep_waiting: Callable[[], bool]) -> None:
        """Give the servers the current weights, and the worker the news.

        A server that died is waited for; `keep_waiting` is called every second, and ends the wait when it says no.
        """
        try:
            report = self._sync.push(self._model, self._version())
        except ServerUnreachable as error:
            text = str(error)
            self._event("warning", "server_lost", f"{text[:1].upper()}{text[1:]}.", url=error.url)
            self._await(error.url, keep_waiting)
            return
        self._report.add("perf/weight_sync_pause_s", report.pause_s)
        self._report.add("perf/weight_sync_transfer_s", report.transfer_s)
        self._announce()

    def server_back(self, url: str) -> None:
        """A server was restarted with the base weights: connect again, push the current ones, let generation go on."""
        self._sync.reopen()
        self._sync.push(self._model, self._version())
        self._restored += 1
        self._announce()
        self._send(ServersReady())
        self._event("info", "server_back", f"The server at {url} is back and has the current weights.", url=url)

    def _announce(self) -> None:
        version = self._version()
        self._send(WeightsPushed(version, self._sync.model_name(version)))

    def _await(self, url: str, keep_waiting: Callable[[], bool]) -> None:
        """Wait until a lost server answers again, then bring it up to date.

        Raises ServerUnreachable after vllm_server_timeout.
        """
        server = ServerApi(url, self._config.request_timeout)
        started = reported = time.monotonic()
        restored = self._restored
        try:
            while keep_waiting() and self._restored == restored:  # a message of the worker may have been quicker
                if server.is_healthy():
                    self.server_back(url)
                    return
                now = time.monotonic()
                if now - started > self._config.vllm_server_timeout:
                    raise ServerUnreachable(url, f"the server at {url} did not come back within {now - started:.0f} s")
                if now - reported >= REPORT_EVERY_S:
                    reported = now
                    print(f"waiting for the server at {url}, {now - started:.0f} s", flush=True)
                time.sleep(POLL_S)
        finally:
            server.close()


def look_at_server(config: AsyncGRPOConfig, event: Callable[..., None]) -> str:
    """Wait until the server is ready; take the row budget from it if none is set; warn when its dtype differs.

    Returns the name of the dtype it serves. Raises WeightSyncError when it is not ready within vllm_server_timeout.
    """
    server = ServerApi(config.server_urls[0], config.request_timeout)
    try:
        server.wait_until_healthy(config.vllm_server_timeout)
        info = server.info()
    finally:
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
