"""Links by which people without an account read one run or one report."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta

from django.conf import settings
from django.db import models
from django.db.models import F
from django.utils import timezone

from webapp.accounts.models import User
from webapp.accounts.permissions import Action, can
from webapp.reports import rendering
from webapp.reports.models import Report
from webapp.runs.models import Run


class ShareLink(models.Model):
    """One link. Only the SHA-256 of its token is stored; the address is shown once, when it is made."""

    run = models.ForeignKey("runs.Run", null=True, on_delete=models.CASCADE, related_name="share_links")
    report = models.ForeignKey("reports.Report", null=True, on_delete=models.CASCADE, related_name="share_links")
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="share_links")
    note = models.CharField(max_length=80, blank=True, help_text="Who it is for.")
    prefix = models.CharField(max_length=8)
    sha256 = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)
    opened = models.PositiveBigIntegerField(default=0)
    last_opened_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created_at",)
        verbose_name = "share link"
        constraints = [
            models.CheckConstraint(
                condition=models.Q(run__isnull=False, report__isnull=True) | models.Q(run__isnull=True, report__isnull=False),
                name="a_link_shares_one_thing",
            )
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.prefix}… to {self.thing}"

    @classmethod
    def create(cls, thing: Run | Report, owner: User, lifetime: timedelta, note: str = "") -> tuple[ShareLink, str]:
        """A new link and its token, which can't be read again later."""
        token = secrets.token_urlsafe(32)
        link = cls.objects.create(
            run=thing if isinstance(thing, Run) else None, report=thing if isinstance(thing, Report) else None, owner=owner,
            note=note, prefix=token[:6], sha256=cls.digest(token), expires_at=timezone.now() + lifetime,
        )  # fmt: skip
        return link, token

    @classmethod
    def live(cls, token: str) -> ShareLink | None:
        """The link of this token; None when there is none, it ended, was revoked, or its maker is locked out."""
        found = cls.objects.select_related("run", "report", "owner").filter(sha256=cls.digest(token)).first()
        return found if found is not None and found.is_live and found.owner.is_active else None

    @staticmethod
    def digest(token: str) -> str:
        return hashlib.sha256(token.encode()).hexdigest()

    @property
    def thing(self) -> Run | Report:
        thing = self.run or self.report
        assert thing is not None  # the database checks it
        return thing

    @property
    def name(self) -> str:
        """How the audit log calls it."""
        return self.thing.name

    @property
    def is_live(self) -> bool:
        return self.revoked_at is None and self.expires_at > timezone.now()

    def note_opened(self) -> None:
        ShareLink.objects.filter(pk=self.pk).update(opened=F("opened") + 1, last_opened_at=timezone.now())

    def runs(self) -> list[Run]:
        """The runs whose charts it may show: of a report those that its maker may share."""
        if self.run is not None:
            return [self.run]
        assert self.report is not None
        return [run for run in rendering.runs_in(self.report.text) if may_share(self.owner, run)]


def may_share(owner: User, run: Run) -> bool:
    """Whether somebody may show a run to the world: who may change it."""
    return can(owner, Action.RUN, run)
