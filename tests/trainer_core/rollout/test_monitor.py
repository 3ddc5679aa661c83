"""Events that are sent once."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer_core.rollout.conftest import MakeTrainer
from tests.trainer_core.rollout.mini_trainer import MiniTrainer
from trainer_core import AsyncRolloutLoop
from trainer_core.rollout import monitor as monitor_module
from trainer_core.rollout.loop import RolloutFailure
from trainer_core.rollout.monitor import Monitor


def test_an_event_is_sent_once_and_the_end_of_new_ones_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "MAX_DISTINCT_EVENTS", 3)
    sent: list[Any] = []
    loop: Any = SimpleNamespace(outbox=SimpleNamespace(send=sent.append))
    monitor = Monitor(loop)
    for number in (1, 1, 2, 3, 3, 4, 5, 1, 6):
        monitor.event_once("warning", "tool_error", f"Tool {number}.")
    assert [event.text for event in sent[:3]] == ["Tool 1.", "Tool 2.", "Tool 3."]
    assert [event.name for event in sent[3:]] == ["events_left_out"]
    assert sent[3].text.startswith("Of events like tool_error, more than 3 different ones came")


class EndsBadly(AsyncRolloutLoop):
    """One of its tasks fails when it is told to end."""

    async def setup(self) -> None:
        self.monitor.follow_servers = self.follow  # type: ignore[method-assign]

    async def follow(self) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            raise KeyError("the third")


def test_failures_after_the_first_are_logged(make: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    async def body(trainer: MiniTrainer) -> None:
        await trainer.train(1)
        trainer.loop.fail(RolloutFailure("the first"))
        trainer.loop.fail(KeyError("the second"))
        await trainer.train(99)

    with caplog.at_level(logging.ERROR), pytest.raises(RolloutFailure, match="the first"):
        make(loop_cls=EndsBadly).run(body)
    assert "the second" in caplog.text
    assert "the third" in caplog.text
    assert "the first" not in caplog.text
