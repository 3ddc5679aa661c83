"""Metric series. Reading and writing goes through store.py, which knows the layout.

Points are kept in columns: a series has an open tail of up to `store.BLOCK_POINTS` points in its own row; a full tail becomes
a Block, which never changes again. One step of seventy metrics thus costs seventy small updates, and a million points are read
as some four thousand rows.
"""

from __future__ import annotations

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
    tail = models.BinaryField(default=b"", help_text="Points not yet in a block, as store.POINT records.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=("attempt", "name"), name="one_series_per_metric")]
        indexes = [models.Index(fields=("run", "name"))]

    def __str__(self) -> str:
        return f"{self.name} of attempt {self.attempt_id}"


class Block(models.Model):
    """`store.BLOCK_POINTS` points of a series, in the order they were written, with what a zoomed-out chart needs of them.

    `low`, `high` and `total` are over finite values, of which there are `finite`; bit k of `kinds` is set when a value has
    PointKind k. `ordered` is set when steps grow strictly and start after everything in the blocks before: only then do these
    numbers stand for the points without a look at them.
    """

    series = models.ForeignKey(Series, on_delete=models.CASCADE, related_name="blocks", db_index=False)
    number = models.PositiveIntegerField()
    first_step = models.BigIntegerField()
    last_step = models.BigIntegerField()
    last_time = models.FloatField()
    last_offset = models.BigIntegerField()
    count = models.PositiveIntegerField()
    finite = models.PositiveIntegerField()
    kinds = models.PositiveSmallIntegerField()
    low = models.FloatField(null=True)
    high = models.FloatField(null=True)
    total = models.FloatField(default=0.0)
    ordered = models.BooleanField()
    data = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=("series", "number"), name="one_block_per_number")]
        indexes = [models.Index(fields=("series", "last_offset"))]
