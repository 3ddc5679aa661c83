"""The list of runs: filters, search, sorting and pages, in a fixed number of queries however many runs there are."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

from django.db import connection
from django.db.models import Count, Exists, F, FloatField, OuterRef, Q, QuerySet, TextField
from django.db.models.fields.json import KT
from django.db.models.functions import Cast

from webapp.accounts.models import User
from webapp.runs.models import LIVE, Run, State

_SUMMARY = ("reward", "step", "tok_s", "staleness")
SORTS = {
    "created": F("created_at"),
    "name": F("name"),
    "state": F("state"),
    "model": F("model"),
    "ended": F("ended_at"),
} | {key: Cast(KT(f"summary__{key}"), FloatField()) for key in _SUMMARY}
"""What a list may be sorted by; a minus in front turns it round. Runs without a value come last either way."""
_NEVER_NULL = ("created", "name", "state")
"""Without a word on NULL in the order PostgreSQL, too, takes the newest runs from an index."""

MAX_PER_PAGE = 500


def run_ids(texts: list[str]) -> list[UUID]:
    """Those of the texts that can be ids of runs; others name none and are left out."""
    found = []
    for text in texts:
        try:
            found.append(UUID(text))
        except ValueError:
            continue
    return found


@dataclass(frozen=True)
class RunFilter:
    """What a list shows. `states` may hold "live". Every word of `search` must occur in name, tags, model, notes or id.

    Raises ValueError with a sentence when a state or sort is unknown, or a page is out of bounds.
    """

    states: tuple[str, ...] = ()
    search: str = ""
    tag: str = ""
    owner: str = ""
    archived: bool = False
    sort: str = "-created"
    page: int = 1
    per_page: int = 50

    def __post_init__(self) -> None:
        for state in self.states:
            if state != "live" and state not in State.values:
                raise ValueError(f"There is no state {state!r:.40}; there are live, {', '.join(State.values)}.")
        if self.sort.removeprefix("-") not in SORTS:
            raise ValueError(f"Runs can't be sorted by {self.sort!r:.40}; they can by {', '.join(SORTS)}.")
        if not 1 <= self.per_page <= MAX_PER_PAGE or not 1 <= self.page <= 10**9:
            raise ValueError(f"A page holds 1 to {MAX_PER_PAGE} runs, and pages count from 1.")


@dataclass(frozen=True)
class RunPage:
    """`runs` have their owner and a `model` attribute. `states` counts the runs in each state, whatever is filtered."""

    runs: list[Run]
    total: int
    page: int
    pages: int
    states: dict[str, int] = field(default_factory=dict)


def list_runs(wanted: RunFilter) -> RunPage:
    """One page of runs. Two queries, or three with a filter."""
    shown = _kept(wanted.archived)
    states = _states(wanted.archived)
    matching = _filtered(shown.annotate(model=KT("spec__model__path")), wanted)
    filtered = any((wanted.states, wanted.search.split(), wanted.tag, wanted.owner))
    total = matching.count() if filtered else sum(states.values())
    descending, name = wanted.sort.startswith("-"), wanted.sort.removeprefix("-")
    last = None if name in _NEVER_NULL else True
    order = SORTS[name].desc(nulls_last=last) if descending else SORTS[name].asc(nulls_last=last)
    orders = [order] if name == "created" else [order, "-created_at"]
    first = (wanted.page - 1) * wanted.per_page
    runs = matching.select_related("owner").defer("spec").order_by(*orders)[first : first + wanted.per_page]
    return RunPage(list(runs), total, wanted.page, max(1, math.ceil(total / wanted.per_page)), states)


def owners() -> list[str]:
    """Names of the people who have runs."""
    having = User.objects.filter(Exists(Run.objects.filter(owner=OuterRef("pk"))))
    return list(having.order_by("username").values_list("username", flat=True))


def _kept(archived: bool) -> QuerySet[Run]:
    """Runs that are archived, or not. As a list of one value, since for `NOT archived` SQLite uses no index."""
    return Run.objects.filter(archived__in=[archived])


def _states(archived: bool) -> dict[str, int]:
    """Number of runs in each state.

    All runs are counted in an index, without their rows, which hold whole specs; archived ones, which are few, are taken away.
    """
    gone = _kept(archived=True).order_by().values_list("state")
    if archived:
        return dict(gone.annotate(count=Count("*")))
    every = Run.objects.order_by().values_list("state").annotate(count=Count("*"))
    counts: Counter[str] = Counter()
    for state, count in every.union(gone.annotate(count=Count("*") * -1), all=True):
        counts[state] += count
    return {state: count for state, count in counts.items() if count}


def _filtered(runs: QuerySet[Run], wanted: RunFilter) -> QuerySet[Run]:
    if wanted.states:
        states = {state for state in wanted.states if state != "live"} | set(LIVE if "live" in wanted.states else ())
        runs = runs.filter(state__in=states)
    if wanted.owner:
        runs = runs.filter(owner__username=wanted.owner)
    if wanted.tag:
        runs = _with_tag(runs, wanted.tag)
    for word in wanted.search.split()[:10]:
        escaped = json.dumps(word)[1:-1]  # as SQLite holds tags and notes: with non-ASCII letters escaped
        runs = runs.annotate(tags_text=Cast("tags", TextField()), notes=KT("spec__notes")).filter(
            Q(name__icontains=word) | Q(model__icontains=word) | Q(notes__icontains=word) | Q(id__icontains=word)
            | Q(tags_text__icontains=word) | Q(tags_text__icontains=escaped)
        )  # fmt: skip
    return runs


def _with_tag(runs: QuerySet[Run], tag: str) -> QuerySet[Run]:
    if connection.features.supports_json_field_contains:
        return runs.filter(tags__contains=[tag])
    return runs.annotate(tags_text=Cast("tags", TextField())).filter(tags_text__contains=json.dumps(tag))
