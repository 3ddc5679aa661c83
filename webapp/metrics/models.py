"""Metric series and their points. Reading and writing goes through store.py, which knows the SQL."""

from __future__ import annotations

from django.db import models


class Series(models.Model):
    """One metric of one attempt. Latest values are kept here so that lists never read points."""

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="series")
    attempt = models.ForeignKey("runs.Attempt", on_delete=models.CASCADE, related_name="series")
    name = models.CharField(max_length=250)
    last_step = models.BigIntegerField(null=True)
    last_time = models.FloatField(null=True)
    last_value = models.FloatField(null=True)
    last_kind = models.PositiveSmallIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=("attempt", "name"), name="one_series_per_metric")]
        indexes = [models.Index(fields=("run", "name"))]

    def __str__(self) -> str:
        return f"{self.name} of attempt {self.attempt_id}"


class Point(models.Model):
    """One value. `kind` tells finite (0), nan (1), +inf (2) and -inf (3) apart; a value that is not finite is NULL.

    `seq` grows with every write, across series: live charts ask for what came after the last one they saw.
    """

    class Kind(models.IntegerChoices):
        FINITE = 0, "finite"
        NAN = 1, "nan"
        POSITIVE_INFINITY = 2, "inf"
        NEGATIVE_INFINITY = 3, "-inf"

    seq = models.BigAutoField(primary_key=True)
    series = models.ForeignKey(Series, on_delete=models.CASCADE, related_name="points")
    step = models.BigIntegerField()
    time = models.FloatField(help_text="Unix seconds.")
    value = models.FloatField(null=True)
    kind = models.PositiveSmallIntegerField(choices=Kind.choices, default=Kind.FINITE)

    class Meta:
        constraints = [models.UniqueConstraint(fields=("series", "step"), name="one_point_per_step")]
