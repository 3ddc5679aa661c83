"""Admission: a group is dispatched only when its samples will be trained within `max_staleness` weight updates.

Samples are trained in the order in which their groups were dispatched (the queue sees to that), and an update follows
every `samples_per_update` of them. A group dispatched at version v behind O unfinished samples, when t samples were already
trained since the last update, therefore begins to be trained at version v + (t + O) // samples_per_update, so

    t + O < (max_staleness + 1) * samples_per_update

is the condition. Groups that finish early overtake slow ones, though. If all others are trained first, a group that was
dispatched at version u and is still under way at version v is trained in time when

    t + O < (u + max_staleness + 1 - v) * samples_per_update

so nothing is dispatched while that does not hold for the oldest group under way: those behind a slow group wait for it, and it
is not dropped. bench/pacing.py shows what that costs and saves. With max_staleness = 0 exactly the samples of one update are
out at a time: the run is synchronous.
Groups are whole: the last one admitted may reach over the bound when an update is no multiple of the group size, since
holding it back would leave the trainer waiting for ever.
"""

from __future__ import annotations

STEPS_REMEMBERED = 4


class StalenessAdmission:
    """Counts what is out and says whether one more group may go. Pure: no clock, no queue.

    `samples_per_update` is exact for a fixed batch. Under a token budget it is a first guess, corrected by what the
    trainer really takes between two updates.
    """

    def __init__(self, max_staleness: int, samples_per_update: int, *, fixed: bool, version: int = 0) -> None:
        if max_staleness < 0 or samples_per_update < 1:
            raise ValueError(
                f"max_staleness {max_staleness}, samples per update {samples_per_update}: at least 0 and 1"
            )
        self.max_staleness = max_staleness
        self.version = version
        self._samples_per_update = float(samples_per_update)
        self._fixed = fixed
        self._outstanding: dict[str, int] = {}
        self._under_way: dict[str, int] = {}  # version at dispatch, in the order of dispatch
        self._trained = 0
        self._history: list[int] = []
        self._extra = False

    @property
    def outstanding(self) -> int:
        """Samples promised to the trainer and not yet consumed."""
        return sum(self._outstanding.values())

    @property
    def limit(self) -> float:
        """Samples that may be trained or promised since the last update."""
        oldest = next(iter(self._under_way.values()), self.version)
        return (oldest + self.max_staleness + 1 - self.version) * self._samples_per_update

    def may_dispatch(self) -> bool:
        return self._extra or self._trained + self.outstanding < self.limit

    def dispatched(self, group_id: str, samples: int) -> None:
        """A group is under way and will give about so many samples."""
        self._outstanding[group_id] = samples
        self._under_way[group_id] = self.version
        self._extra = False

    def scored(self, group_id: str, samples: int) -> None:
        """The group turned out to give so many samples, which are on their way to the queue: nothing overtakes them."""
        self._outstanding[group_id] = samples
        self._under_way.pop(group_id, None)

    def released(self, group_id: str) -> None:
        """The group gives nothing (dropped or failed): its slot is free at once."""
        self._under_way.pop(group_id, None)
        self._outstanding.pop(group_id, None)

    def consumed(self, group_id: str, *, trained: int) -> None:
        """The trainer is done with the group, of which it trained so many samples."""
        self._under_way.pop(group_id, None)
        self._outstanding.pop(group_id, None)
        self._trained += trained

    def updated(self, version: int) -> None:
        """The servers have new weights."""
        if not self._fixed and self._trained:
            self._history = [*self._history, self._trained][-STEPS_REMEMBERED:]
            self._samples_per_update = sum(self._history) / len(self._history)
        self.version = version
        self._trained = 0

    def trainer_starves(self) -> None:
        """The trainer waits with an empty queue and nothing is under way: one more group may go, whatever the bound says.

        Happens when the number of samples of a step was guessed too low (token budget), or a stale sample was dropped.
        """
        self._extra = True

    def is_doomed(self, group_version: int) -> bool:
        """Whether samples begun at this version are too old already."""
        return self.version - group_version > self.max_staleness
