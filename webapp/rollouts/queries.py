"""Finds stored rollouts: by step, by what was said, by reward, and prompts that came up more than once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from django.db.models import Avg, Max, Min, QuerySet

from webapp.rollouts.models import StoredRollout
from webapp.rollouts.text import Shown, messages
from webapp.runs.models import Run

CUT = 3000
"""Characters of a message that a list shows; the rollout's own page has all."""


@dataclass
class Search:
    """What is looked for. `problems` are sentences on what was asked for wrongly and is left out of account."""

    text: str = ""
    from_step: int | None = None
    to_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Search:
        search = cls(values.get("search", "").strip())
        for name, kind in (("from_step", int), ("to_step", int), ("min_reward", float), ("max_reward", float)):
            if text := values.get(name, "").strip():
                setattr(search, name, search._number(name, text, kind))
        return search

    def _number(self, name: str, text: str, kind: type[int] | type[float]) -> float | None:
        what, wanted = ("step", "a whole number") if kind is int else ("reward", "a number such as 0.5")
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and abs(number) < 2**62:
            return number
        self.problems.append(f"{text[:40]!r} is no {what}; {wanted} is needed.")
        return None

    @property
    def active(self) -> bool:
        limits = (self.from_step, self.to_step, self.min_reward, self.max_reward)
        return bool(self.text) or any(limit is not None for limit in limits)

    def apply(self, rollouts: QuerySet[StoredRollout]) -> QuerySet[StoredRollout]:
        """The rollouts that match. Every word must be said, in any order; words in double quotes together."""
        for index, part in enumerate(self.text.split('"')):
            for words in [part.strip()] if index % 2 else part.split():
                if words:
                    rollouts = rollouts.filter(text__contains=words.casefold().replace("\0", "\ufffd"))
        bounds = {"step__gte": self.from_step, "step__lte": self.to_step, "reward__gte": self.min_reward,
                  "reward__lte": self.max_reward}  # fmt: skip
        return rollouts.filter(**{name: value for name, value in bounds.items() if value is not None})


def row_title(row_index: int) -> str:
    """Rows of the evaluation dataset are stored as -1, -2 and so on."""
    return f"Row {row_index}" if row_index >= 0 else f"Evaluation row {-1 - row_index}"


@dataclass
class Card:
    """A rollout as a list shows it. `found` says whether it is one that was looked for, or only of the same group."""

    rollout: StoredRollout
    messages: list[Shown]
    found: bool = False

    @property
    def hidden(self) -> int:
        return sum(message.hidden for message in self.messages)


@dataclass
class Group:
    """Rollouts of one prompt at one step, the best first. `other_steps` says whether the prompt came up at others too."""

    step: int
    group_id: str
    row_index: int
    prompt: list[Shown]
    cards: list[Card]
    other_steps: bool = False

    @property
    def first(self) -> StoredRollout:
        return self.cards[0].rollout

    @property
    def title(self) -> str:
        return row_title(self.row_index)

    @property
    def dropped(self) -> str:
        return self.first.data.get("dropped") or ""

    @property
    def long(self) -> bool:
        """Whether a completion needs a wide column."""
        lengths = [card.rollout.data.get("tokens", 0) for card in self.cards]
        return any(isinstance(length, int) and length > 60 for length in lengths)

    @property
    def mean(self) -> float | None:
        known = [card.rollout.reward for card in self.cards if card.rollout.reward is not None]
        return sum(known) / len(known) if known else None


@dataclass
class Steps:
    """The step that is shown, its neighbours with rollouts, and the ends."""

    at: int | None
    first: int | None = None
    last: int | None = None
    previous: int | None = None
    next: int | None = None


def steps_around(run: Run, wanted: str) -> Steps:
    """The step `wanted`, or the nearest earlier one with rollouts; the newest when `wanted` is no number."""
    rollouts = run.rollouts.order_by("step")
    ends = rollouts.aggregate(first=Min("step"), last=Max("step"))
    at = ends["last"]
    if wanted.lstrip("-").isdecimal() and abs(int(wanted)) < 2**62:
        at = _step(rollouts.filter(step__lte=int(wanted)).reverse()) or _step(rollouts) or 0
    if at is None:
        return Steps(None)
    before, after = _step(rollouts.filter(step__lt=at).reverse()), _step(rollouts.filter(step__gt=at))
    return Steps(at, ends["first"], ends["last"], before, after)


def _step(rollouts: QuerySet[StoredRollout]) -> int | None:
    return rollouts.values_list("step", flat=True).first()


def group_ids(run: Run, step: int | None, search: Search) -> QuerySet[StoredRollout, tuple[str, int]]:
    """(group_id, last row) of the groups to show: those of a step, or the newest first of what is searched for."""
    if search.active:
        found = search.apply(run.rollouts.all())
    else:
        found = run.rollouts.none() if step is None else run.rollouts.filter(step=step)
    return (
        found.order_by().values_list("group_id").annotate(last=Max("id")).order_by("-last" if search.active else "last")
    )


def groups(run: Run, ids: list[str], search: Search | None = None, cut: int | None = CUT) -> list[Group]:
    """The groups of these ids in their order. A fixed number of queries."""
    rows = list(run.rollouts.filter(group_id__in=ids).defer("text").order_by("id"))
    found = set()
    if search is not None and search.active:
        found = set(search.apply(run.rollouts.filter(group_id__in=ids)).values_list("pk", flat=True))
    repeated = _repeated(run, {row.row_index for row in rows})
    rows.sort(key=lambda row: ids.index(row.group_id))
    result = []
    for group_id, members in groupby(rows, key=lambda row: row.group_id):
        best_first = sorted(members, key=lambda row: (row.reward is None, -(row.reward or 0.0), row.pk))
        first = best_first[0]
        cards = [
            Card(row, messages(row.data.get("completion"), "assistant", cut), row.pk in found) for row in best_first
        ]
        prompt = messages(first.data.get("prompt"), "user", cut)
        result.append(Group(first.step, group_id, first.row_index, prompt, cards, first.row_index in repeated))
    return result


def _repeated(run: Run, row_indices: Iterable[int]) -> set[int]:
    """Those of the rows that have rollouts at more than one step."""
    spans = run.rollouts.filter(row_index__in=list(row_indices)).order_by().values_list("row_index")
    return {row for row, low, high in spans.annotate(Min("step"), Max("step")) if low != high}


@dataclass(frozen=True)
class Prompt:
    """A prompt that came up at several steps, with the mean reward at the first and the last of them."""

    row_index: int
    count: int
    first: int
    last: int
    old: float | None
    new: float | None

    @property
    def title(self) -> str:
        return row_title(self.row_index)

    @property
    def change(self) -> float | None:
        return None if self.old is None or self.new is None else self.new - self.old


def repeated_prompts(run: Run) -> list[Prompt]:
    """Prompts that came up at more than one step, those that changed most first."""
    means = run.rollouts.order_by("row_index", "step").values_list("row_index", "step").annotate(Avg("reward"))
    prompts = []
    for row, members in groupby(means, key=lambda item: item[0]):
        of_row = list(members)
        if len(of_row) > 1:
            (_, first, old), (_, last, new) = of_row[0], of_row[-1]
            prompts.append(Prompt(row, len(of_row), first, last, old, new))
    return sorted(prompts, key=lambda prompt: (prompt.change is None, -abs(prompt.change or 0.0), prompt.row_index))


def steps_of(run: Run, row_index: int) -> list[int]:
    """Steps at which a prompt came up."""
    return list(run.rollouts.filter(row_index=row_index).order_by("step").values_list("step", flat=True).distinct())
