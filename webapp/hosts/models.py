"""Hosts, their devices, and who holds them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from django.db import models
from django.db.models import Q
from django.utils import timezone

if TYPE_CHECKING:
    from webapp.playground.models import PlaygroundServer
    from webapp.runs.models import Attempt

ALIVE_FOR = timedelta(seconds=30)
"""A host is shown as alive this long after its worker last reported."""


def host_name() -> str:
    """What this machine is called among the hosts."""
    return os.environ.get("OFFBEAT_HOST") or socket.gethostname()


class Host(models.Model):
    """A machine that runs a Celery worker. Its queue is `host.<name>`. What is null it has not told yet."""

    name = models.CharField(max_length=200, unique=True)
    address = models.CharField(max_length=255, blank=True, help_text="Where other hosts reach it.")
    cpu_count = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveBigIntegerField(default=0)
    load = models.FloatField(null=True, help_text="Processes that run or want to, mean of a minute.")
    memory_free_mib = models.PositiveBigIntegerField(null=True)
    disk_mib = models.PositiveBigIntegerField(null=True)
    disk_free_mib = models.PositiveBigIntegerField(null=True)
    bf16 = models.BooleanField(null=True, help_text="Whether its processor multiplies in bfloat16.")
    last_seen_at = models.DateTimeField(null=True)
    drained = models.BooleanField(default=False, help_text="No new run starts on a drained host.")

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name

    @property
    def queue(self) -> str:
        return f"host.{self.name}"

    @property
    def alive(self) -> bool:
        return self.last_seen_at is not None and timezone.now() - self.last_seen_at < ALIVE_FOR

    @property
    def memory_used_mib(self) -> int | None:
        return None if self.memory_free_mib is None else self.memory_mib - self.memory_free_mib

    @property
    def disk_used_mib(self) -> int | None:
        return None if self.disk_mib is None or self.disk_free_mib is None else self.disk_mib - self.disk_free_mib


class Device(models.Model):
    """A GPU (by UUID, never by index), or the one CPU slot of a host without GPUs (`cpu:<host>`).

    `util`, `memory_used_mib`, `temperature_c` and `power_w` are those of the whole GPU, of which this may be one slot; null
    for a CPU slot, and where the card does not tell.
    """

    class Kind(models.TextChoices):
        GPU = "gpu", "GPU"
        CPU = "cpu", "CPU slot"

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="devices")
    uuid = models.CharField(max_length=200, unique=True)
    kind = models.CharField(max_length=3, choices=Kind.choices)
    index = models.PositiveIntegerField(default=0)
    name = models.CharField(max_length=200)
    memory_mib = models.PositiveBigIntegerField(default=0)
    util = models.FloatField(null=True, help_text="Percent.")
    memory_used_mib = models.PositiveBigIntegerField(null=True)
    temperature_c = models.FloatField(null=True)
    power_w = models.FloatField(null=True)
    present = models.BooleanField(default=True, help_text="Seen by the host's worker when it last looked.")

    class Meta:
        ordering = ("host", "kind", "index")

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


ONE_HOLDER = Q(attempt=None, playground__isnull=False) | Q(attempt__isnull=False, playground=None)


class Lease(models.Model):
    """An attempt or a playground server holds one device. The unique key is the lock: two can't both insert it.

    `follower` is set for a device of a further host of an attempt: who gives it back.
    """

    class Purpose(models.TextChoices):
        SERVER = "server", "vLLM server"
        TRAINER = "trainer", "trainer"
        BOTH = "both", "server and trainer"

    device = models.OneToOneField(Device, on_delete=models.PROTECT, related_name="lease")
    attempt = models.ForeignKey("runs.Attempt", null=True, on_delete=models.PROTECT, related_name="leases")
    playground = models.ForeignKey(
        "playground.PlaygroundServer", null=True, on_delete=models.PROTECT, related_name="leases"
    )
    follower = models.ForeignKey("runs.Follower", null=True, on_delete=models.PROTECT, related_name="leases")
    purpose = models.CharField(max_length=7, choices=Purpose.choices)
    replica = models.PositiveSmallIntegerField(
        null=True, help_text="Which of several servers of the run it is for, from 0; null where there is one, or none."
    )
    acquired_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.CheckConstraint(condition=ONE_HOLDER, name="one_holder_of_a_device")]

    @property
    def holder(self) -> Attempt | PlaygroundServer:
        found = self.attempt or self.playground
        assert found is not None, "the constraint"
        return found

    @property
    def use(self) -> str:
        """What it is for, as "vLLM server 1"."""
        return self.get_purpose_display() + ("" if self.replica is None else f" {self.replica}")

    @property
    def held_by(self) -> str:
        """As it stands behind "held by"."""
        return f"run {self.attempt.run.name}" if self.attempt else str(self.playground)


class PortLease(models.Model):
    """A TCP port of a host, held by an attempt or a playground server until it ends."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="ports")
    port = models.PositiveIntegerField()
    attempt = models.ForeignKey("runs.Attempt", null=True, on_delete=models.PROTECT, related_name="ports")
    playground = models.ForeignKey(
        "playground.PlaygroundServer", null=True, on_delete=models.PROTECT, related_name="ports"
    )
    purpose = models.CharField(max_length=40)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=("host", "port"), name="one_holder_per_port"),
            models.CheckConstraint(condition=ONE_HOLDER, name="one_holder_of_a_port"),
        ]
