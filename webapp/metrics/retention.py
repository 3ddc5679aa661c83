"""Dropping single points of old runs, as an admin has allowed; rollups of up to 16 points stay, so every chart stays.

Nothing is dropped unless the setting says so, and each run gets an event that says what was dropped. What stays whole: live
runs, the last block of a series, blocks that a newer attempt cuts in two, and series whose steps came out of order, since
rollups leave late points out (see models.Block).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from webapp.metrics import reading
from webapp.metrics.layout import decode_lines
from webapp.metrics.models import Block, Retention, Series
from webapp.metrics.turns import turn
from webapp.runs.lifecycle import record
from webapp.runs.models import LIVE, Run

DROPPED = "points_dropped"
"""Name of the event that says what was dropped. Its data has points, bytes and reasons."""


@dataclass
class Droppable:
    """What the setting allows to drop of one run."""

    run: Run
    blocks: list[tuple[Series, QuerySet[Block]]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def setting() -> Retention:
    return Retention.objects.first() or Retention()


def droppable(policy: Retention, now: datetime) -> Iterator[Droppable]:
    """Run by run; runs of which nothing may be dropped are left out."""
    allowed = [days for days in (policy.superseded_days, policy.ended_days) if days is not None]
    if not allowed:
        return
    old = Run.objects.exclude(state__in=LIVE).filter(ended_at__lte=now - timedelta(days=min(allowed)))
    for run in old.order_by("ended_at").iterator(chunk_size=200):
        found = _of_run(run, policy, now)
        if found.blocks:
            yield found


def _of_run(run: Run, policy: Retention, now: datetime) -> Droppable:
    assert run.ended_at is not None
    age = (now - run.ended_at).days
    everything = policy.ended_days is not None and age >= policy.ended_days
    superseded = policy.superseded_days is not None and age >= policy.superseded_days
    found = Droppable(run)
    for part in reading.parts(run):
        wanted = Q(pk__in=[])
        if everything and part.end is None:
            wanted = Q()
        elif everything:
            wanted = Q(last_step__lt=part.end) | Q(first_step__gte=part.end)
        elif superseded and part.end is not None:
            wanted = Q(first_step__gte=part.end)
        for series in part.attempt.series.filter(blocks_written__gt=1, late_points=0):
            tail = decode_lines(bytes(series.tail))
            if (tail["step"] <= series.sealed_max_step).any():
                continue
            blocks = series.blocks.filter(wanted, number__lt=series.blocks_written - 1).exclude(data=b"")
            if blocks.exists():
                found.blocks.append((series, blocks))
    if everything:
        found.reasons.append(f"the run ended {age} days ago")
    elif superseded:
        found.reasons.append(f"a newer attempt superseded them, and the run ended {age} days ago")
    return found


def count(found: Droppable) -> tuple[int, int]:
    """Points, and bytes of the database."""
    points = size = 0
    for _, blocks in found.blocks:
        for data in blocks.values_list("data", flat=True).iterator(chunk_size=500):
            points += len(decode_lines(data))
            size += len(data)
    return points, size


def drop(found: Droppable) -> tuple[int, int]:
    """Drop the points of one run; returns how many, and their bytes. One transaction, with the event that tells of it."""
    points = size = 0
    with turn(), transaction.atomic():
        if not Run.objects.select_for_update().filter(pk=found.run.pk).exclude(state__in=LIVE).exists():
            return 0, 0  # it was resumed meanwhile
        for series, blocks in found.blocks:
            own, bytes_ = count(Droppable(found.run, [(series, blocks)]))
            blocks.update(data=b"")
            Series.objects.filter(pk=series.pk).update(dropped_points=F("dropped_points") + own)
            points, size = points + own, size + bytes_
        record(
            found.run, DROPPED,
            f"Dropped {points:,} single points ({size / 1e6:.1f} MB) of {len(found.blocks)} series, as the retention setting "
            f"says: {'; '.join(found.reasons)}. Their rollups, a row for up to 16 points, stay.",
            points=points, bytes=size,
        )  # fmt: skip
    return points, size


def drop_all(now: datetime | None = None) -> tuple[int, int]:
    """Drop what the setting allows by now; returns points and bytes."""
    policy, points, size = setting(), 0, 0
    for found in droppable(policy, now or timezone.now()):
        own, bytes_ = drop(found)
        points, size = points + own, size + bytes_
    return points, size
