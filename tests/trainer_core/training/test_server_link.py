"""Servers that die while they are given weights, and while they are brought back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_core import weights
from trainer_core.report import StepReport
from trainer_core.rollout.messages import ServersAway, ServersReady, WeightsPushed
from trainer_core.sync import PushReport, ServerRefused, ServerUnreachable
from trainer_core.sync.base import PHASES
from trainer_core.weights import ServerLink

A, B = "http://a", "http://b"


REFUSED = "refused"


class Sync:
    """Raises what `troubles` holds, call after call of reopen and push: a server that is gone, or REFUSED; None passes.

    `away` are servers that do not answer.
    """

    def __init__(self, *troubles: str | None) -> None:
        self.troubles = list(troubles)
        self.away: list[str] = []
        self.pushed: list[int] = []

    def _pass(self) -> None:
        if self.troubles and (url := self.troubles.pop(0)) is not None:
            if url == REFUSED:
                raise ServerRefused(A, f"the server at {A} refused POST /update_weights: no trainer is connected", 500)
            raise ServerUnreachable(url, f"the server at {url} cannot be reached")

    def reopen(self) -> list[str]:
        self._pass()
        return self.away

    def push(self, model: Any, version: int) -> PushReport:
        self._pass()
        self.pushed.append(version)
        return PushReport(0.9, 0.3, 0.4, dict.fromkeys(PHASES, 0.1))

    def model_name(self, version: int) -> str:
        return f"v{version}"


class Told:
    """A link with what it told: messages to the worker, and names and addresses of events."""

    def __init__(self, sync: Sync, *urls: str, timeout: float = 5.0) -> None:
        self.sent: list[Any] = []
        self.events: list[tuple[str, str]] = []
        self.report = StepReport(torch.device("cpu"))
        config: Any = SimpleNamespace(server_urls=list(urls), vllm_server_timeout=timeout)
        self.link = ServerLink(
            config=config,
            sync=sync,  # type: ignore[arg-type]
            model=None,
            version=lambda: 7,
            send=self.sent.append,
            report=self.report,
            event=lambda level, name, text, url: self.events.append((name, url)),
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "POLL_S", 0.01)


def always() -> bool:
    return True


def test_a_second_death_while_a_server_is_brought_back() -> None:
    sync = Sync(None, A, A, None, None)  # reopen, push fails; reopen fails; reopen, push
    told = Told(sync, A)
    told.link.server_back(A, always)
    assert sync.pushed == [7]
    assert told.sent == [WeightsPushed(7, "v7"), ServersReady([A])]
    assert told.events == [("server_back", A)]


def test_a_push_goes_on_with_the_servers_that_answer() -> None:
    sync = Sync(B)
    sync.away = [B]
    told = Told(sync, f"{A}/", B)
    told.link.push(always)
    assert told.sent == [ServersAway([B]), WeightsPushed(7, "v7"), ServersReady([A])]
    assert told.events == [("server_lost", B)]
    told.link.push(always)
    assert told.sent[3:] == [WeightsPushed(7, "v7")]
    sync.away = []
    told.link.server_back(B, always)
    assert told.sent[4:] == [WeightsPushed(7, "v7"), ServersReady([A, B])]
    assert told.events == [("server_lost", B), ("server_back", B)]


def test_a_server_that_another_ones_return_finds_gone_is_told() -> None:
    sync = Sync()
    sync.away = [A]
    told = Told(sync, A, B)
    told.link.server_back(B, always)
    assert told.sent == [ServersAway([A]), WeightsPushed(7, "v7"), ServersReady([B])]
    assert told.events == [("server_lost", A), ("server_back", B)]


def test_news_of_a_return_during_the_search_start_no_second_one() -> None:
    sync = Sync(A, A, None, None)  # push, reopen fail; reopen, push
    told = Told(sync, A)

    def poll() -> bool:
        told.link.server_back(A, always)
        return True

    told.link.push(poll)
    assert sync.pushed == [7]
    assert told.events == [("server_lost", A), ("server_back", A)]


def test_an_order_to_stop_ends_the_wait() -> None:
    told = Told(Sync(*[A] * 9), A)
    told.link.push(lambda: False)
    assert told.sent == []
    assert told.events == [("server_lost", A)]


def test_a_server_that_is_well_and_takes_no_weights_ends_the_run() -> None:
    told = Told(Sync(A, *[None, A] * 99), A)
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        told.link.push(always)
    assert told.events == [("server_lost", A)]


def test_a_server_that_restarted_since_the_last_push_is_connected_again() -> None:
    sync = Sync(REFUSED)  # it answers, and knows of no trainer; the news of its return is not read yet
    told = Told(sync, A)
    told.link.push(always)
    assert sync.pushed == [7]
    assert told.sent == [WeightsPushed(7, "v7"), ServersReady([A])]
    told.link.server_back(A, always)
    assert told.events == [("server_back", A)]


def test_weights_that_are_refused_again_and_again_end_the_run() -> None:
    told = Told(Sync(*[REFUSED, None] * 9), A)
    with pytest.raises(ServerRefused, match="no trainer is connected"):
        told.link.push(always)
    assert told.sent == []


def test_the_wait_has_an_end() -> None:
    told = Told(Sync(*[A] * 99), A, timeout=0.1)
    with pytest.raises(ServerUnreachable, match="the server at http://a did not come back within 0 s"):
        told.link.push(always)


def test_a_push_reports_each_of_its_phases() -> None:
    told = Told(Sync(), A)
    told.link.push(always)
    told.link.push(always)
    values = told.report.buffers[0].flush()
    assert values["perf/weight_sync_pause_s"] == pytest.approx(0.6)
    assert all(values[f"perf/weight_sync_{phase}_s"] == pytest.approx(0.2) for phase in PHASES)
