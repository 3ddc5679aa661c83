"""Metric series. Reading and writing goes through reading.py and store.py; layout.py knows what the bytes mean.

A series has an open tail of up to `appending.BLOCK_POINTS` points in its own row; a full tail becomes a Block, which never
changes again. Rollups lie beside them: 16 points a row in the block; a block a row, 16 blocks a row and so on in Packs. One
step of seventy metrics thus costs seventy small updates, and a chart reads some thousand rows whatever the number of points.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models


class PointKind(models.IntegerChoices):
    """Tells a finite value from the others where the number itself is NULL: SQL columns and JSON have no NaN."""

    FINITE = 0, "finite"
    NAN = 1, "nan"
    POSITIVE_INFINITY = 2, "inf"
    NEGATIVE_INFINITY = 3, "-inf"


class Series(models.Model):
    """One metric of one attempt. The latest value is kept apart, so that lists never read points."""

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="series")
    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="series", db_index=False)
    name = models.CharField(max_length=250)
    points = models.PositiveBigIntegerField(default=0, help_text="Points written, repeated steps included.")
    first_step = models.BigIntegerField(null=True, help_text="Smallest step.")
    last_step = models.BigIntegerField(null=True, help_text="Step of the point written last.")
    last_time = models.FloatField(null=True, help_text="Unix seconds of the point written last.")
    last_value = models.FloatField(null=True)
    last_kind = models.PositiveSmallIntegerField(choices=PointKind.choices, default=PointKind.FINITE)
    last_offset = models.BigIntegerField(
        default=-1, help_text="Byte of the spool where the newest point's line begins."
    )
    blocks_written = models.PositiveIntegerField(default=0)
    sealed_max_step = models.BigIntegerField(null=True, help_text="Largest step in the blocks.")
    late_points = models.PositiveBigIntegerField(default=0, help_text="Points in blocks that were late: see Block.")
    dropped_points = models.PositiveBigIntegerField(
        default=0, help_text="Points of which only rollups are left: see retention.py."
    )
    tail = models.BinaryField(default=b"", help_text="Points not yet in a block, as layout.encode makes them.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=("attempt", "name"), name="one_series_per_metric")]
        indexes = [models.Index(fields=("run", "name"))]

    def __str__(self) -> str:
        return f"{self.name} of attempt {self.attempt_id}"


class Block(models.Model):
    """Points of a series in the order they were written.

    A point is late when its step is not above `after_step`, the largest step in the blocks before. Rollups leave late points
    out, so their rows are in order and apart; who reads them looks at the late ones, which are few as a rule, one by one.
    `first_step` and `last_step` are of all points.
    """

    series = models.ForeignKey(Series, on_delete=models.CASCADE, related_name="blocks", db_index=False)
    number = models.PositiveIntegerField()
    first_step = models.BigIntegerField()
    last_step = models.BigIntegerField()
    after_step = models.BigIntegerField(null=True)
    last_offset = models.BigIntegerField()
    late = models.PositiveIntegerField()
    rollup = models.BinaryField(help_text="A layout.STORED_ROW for each layout.FAN steps that are not late.")
    data = models.BinaryField(help_text="Empty when retention has dropped the points; the rollup stays.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=("series", "number"), name="one_block_per_number")]
        indexes = [
            models.Index(fields=("series", "last_offset")),
            models.Index(fields=("series", "number"), condition=models.Q(late__gt=0), name="blocks_with_late_points"),
        ]


class Pack(models.Model):
    """Rollup rows of a series. A row of level k stands for layout.FAN^k blocks; row i of pack n has index n * PACK_ROWS + i."""

    series = models.ForeignKey(Series, on_delete=models.CASCADE, related_name="packs", db_index=False)
    level = models.PositiveSmallIntegerField()
    number = models.PositiveIntegerField()
    first_step = models.BigIntegerField()
    last_step = models.BigIntegerField()
    full = models.BooleanField()
    data = models.BinaryField(help_text="layout.STORED_ROW records.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=("series", "level", "number"), name="one_pack_per_number")]
        indexes = [models.Index(fields=("series",), condition=models.Q(full=False), name="open_packs")]


class Retention(models.Model):
    """What may be dropped, in one row that an admin makes; without it nothing is. NULL keeps for ever."""

    superseded_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="Days after a run's end until points that a newer attempt superseded are dropped.",
    )
    ended_days = models.PositiveIntegerField(
        null=True, blank=True, help_text="Days after a run's end until all its single points are dropped."
    )
    changed_at = models.DateTimeField(auto_now=True)
    changed_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
