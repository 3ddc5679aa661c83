"""Alarms about scoring: when nothing can be scored, nothing is, or every reward is the same. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FIRST_GROUPS = 4
"""When so many groups at the start all fail to be scored, the reward functions are broken and the run fails."""
FAILING_GROUPS = 64
EQUAL_GROUPS = 32
"""An alarm comes after so many groups in a row that teach nothing, and again after as many more."""


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

    def observe(self, *, failed: bool, equal: bool, unscored: bool = False, reason: str = "") -> Verdict | None:
        """`failed`: no rollout could be scored because a reward function failed, as `reason` says.

        `unscored`: none was, though nothing failed; each reward was None.
        """
        self._groups += 1
        self._failing = self._failing + 1 if failed else 0
        self._equal = self._equal + 1 if equal and not failed else 0
        self._unscored = self._unscored + 1 if unscored and not failed else 0
        if self._failing == self._groups == FIRST_GROUPS:
            return Verdict("fatal", f"none of the first {FIRST_GROUPS} groups could be scored: {reason}")
        if self._failing == FAILING_GROUPS:
            return Verdict("fatal", f"none of the last {FAILING_GROUPS} groups could be scored: {reason}")
        if self._equal and self._equal % EQUAL_GROUPS == 0:
            text = f"all rewards were equal within each of the last {self._equal} groups, so there is nothing to learn from"
            return Verdict("alarm", text)
        if self._unscored and self._unscored % EQUAL_GROUPS == 0:
            text = f"every reward of the last {self._unscored} groups was None, so there is nothing to learn from"
            return Verdict("alarm", text)
        return None
