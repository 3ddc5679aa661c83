"""Alarms about scoring: when nothing can be scored, nothing is, or every reward is the same. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FIRST_GROUPS = 4
"""When so many groups at the start all fail to be scored, the reward functions are broken and the run fails."""
FAILING_GROUPS = 64
EQUAL_GROUPS = 32
"""An alarm comes after so many groups in a row that teach nothing, and again after a row that is twice as long: a run that has
learnt its task has many such rows."""


@dataclass(frozen=True)
class Verdict:
    """`fatal` ends the run; an alarm is an event."""

    kind: Literal["fatal", "alarm"]
    text: str


class RewardWatch:
    """Follows the outcome of each group's scoring."""

    def __init__(self) -> None:
        self._groups = 0
        self._failing = 0
        self._equal = 0
        self._unscored = 0
        self._equal_rewards = 0.0
        self._equal_alarm_at = self._unscored_alarm_at = EQUAL_GROUPS

    def observe(
        self, *, failed: bool, equal: bool, unscored: bool = False, reason: str = "", reward: float = 0.0
    ) -> Verdict | None:
        """`failed`: no rollout could be scored because a reward function failed, as `reason` says.

        `equal`: all rewards of the group are `reward`. `unscored`: there are none, though nothing failed; each was None.
        """
        self._groups += 1
        self._failing = self._failing + 1 if failed else 0
        self._equal = self._equal + 1 if equal and not failed else 0
        self._equal_rewards = self._equal_rewards + reward if self._equal else 0.0
        self._unscored = self._unscored + 1 if unscored and not failed else 0
        if self._failing == self._groups == FIRST_GROUPS:
            return Verdict("fatal", f"none of the first {FIRST_GROUPS} groups could be scored: {reason}")
        if self._failing == FAILING_GROUPS:
            return Verdict("fatal", f"none of the last {FAILING_GROUPS} groups could be scored: {reason}")
        if self._equal == self._equal_alarm_at:
            self._equal_alarm_at *= 2
            mean = self._equal_rewards / self._equal
            text = (
                f"all rewards were equal within each of the last {self._equal} groups ({mean:.2f} on average), so there is "
                "nothing to learn from"
            )
            return Verdict("alarm", text)
        if self._unscored == self._unscored_alarm_at:
            self._unscored_alarm_at *= 2
            text = f"every reward of the last {self._unscored} groups was None, so there is nothing to learn from"
            return Verdict("alarm", text)
        return None
