"""What the supervisor of an attempt sees of the further hosts of its trainer."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from webapp.runs.models import ACTIVE, Attempt, Follower, State
from workers.ending import Outcome, last_event

SILENT_FOR_S = 60.0
"""A follower whose heartbeat stands still for so long is gone."""
GRACE_S = 10.0
"""How long the trainer has to say itself why it ends, after a follower has ended."""


class Followers:
    """The followers of an attempt. `trouble` costs nothing where there are none."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._any: bool | None = None
        self._heard: dict[UUID, tuple[datetime | None, float]] = {}
        self._looked = 0.0
        self._failed_at = 0.0

    def trouble(self, trains: bool) -> str | None:
        """Why the trainer can't go on, in a sentence; None while it can.

        `trains`: the trainer runs, so that its ranks see such an end themselves; that they did not is said a little later.
        """
        if self._any is None:
            self._any = self.attempt.followers.exists()
        if not self._any:
            return None
        now = time.monotonic()
        followers = list(self.attempt.followers.select_related("host"))
        self._listen(followers, now)
        if (found := self._lost(followers, now)) is None:
            return None
        self._failed_at = self._failed_at or now
        return None if trains and now - self._failed_at < GRACE_S else found

    def _listen(self, followers: list[Follower], now: float) -> None:
        """Note when each was heard last. By this clock, and from new on after a time in which the database did not answer: then
        they could not report either."""
        gap = now - self._looked > SILENT_FOR_S / 4
        self._looked = now
        for follower in followers:
            before = self._heard.get(follower.pk)
            if gap or before is None or before[0] != follower.heartbeat_at:
                self._heard[follower.pk] = follower.heartbeat_at, now

    def _lost(self, followers: list[Follower], now: float) -> str | None:
        for follower in followers:
            if follower.state == State.FAILED:
                return follower.reason
            if follower.state in ACTIVE and now - self._heard[follower.pk][1] > SILENT_FOR_S:
                return (
                    f"Host {follower.host.name}, which has a part of the trainer, has not reported for {SILENT_FOR_S:.0f} s; "
                    "resume to go on from the last checkpoint."
                )
        return None

    def explain(self, outcome: Outcome) -> Outcome:
        """The outcome with a follower's own reason in the place of "a rank is gone", where it has one."""
        failed = last_event(self.attempt, "failed")
        if outcome.state != State.FAILED or failed is None or failed.data.get("kind") != "RankLost":
            return outcome
        told = self.attempt.followers.filter(state=State.FAILED, exit_code=None).first()
        return outcome if told is None else replace(outcome, reason=told.reason)
