"""People and their API tokens."""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime, timedelta

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone


class Role(models.TextChoices):
    """What an account may do; permissions.py has the rules."""

    VIEWER = "viewer", "viewer"
    RUNNER = "runner", "runner"
    AUTHOR = "author", "author of rewards"
    RUNNER_AND_AUTHOR = "runner+author", "runner and author"
    ADMIN = "admin", "admin"


class User(AbstractUser):
    """An account. `must_change_password` is set on the first account, whose password was printed in a terminal."""

    must_change_password = models.BooleanField(default=False)
    is_runner = models.BooleanField(default=True, help_text="May make runs, and steer their own.")
    is_author = models.BooleanField(default=True, help_text="May write reward functions.")

    looks_only = False
    """Set for one request: it came with an API token that may only read."""

    @property
    def role(self) -> Role:
        if self.is_superuser:
            return Role.ADMIN
        if self.is_runner:
            return Role.RUNNER_AND_AUTHOR if self.is_author else Role.RUNNER
        return Role.AUTHOR if self.is_author else Role.VIEWER

    @role.setter
    def role(self, role: Role) -> None:
        self.is_superuser = role == Role.ADMIN
        self.is_runner = role in (Role.RUNNER, Role.RUNNER_AND_AUTHOR, Role.ADMIN)
        self.is_author = role in (Role.AUTHOR, Role.RUNNER_AND_AUTHOR, Role.ADMIN)


class ApiToken(models.Model):
    """A bearer token. Only its SHA-256 is stored; the text is shown once, when it is made."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=80)
    prefix = models.CharField(max_length=12)
    sha256 = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField(null=True)
    reads_only = models.BooleanField(default=False, help_text="May look at everything and change nothing.")

    class Meta:
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}...)"

    @classmethod
    def create(
        cls, user: User, name: str, lifetime: timedelta | None = None, *, reads_only: bool = False
    ) -> tuple[ApiToken, str]:
        """A new token and its text, which can't be read again later."""
        text = f"ob_{secrets.token_urlsafe(32)}"
        expires_at = timezone.now() + lifetime if lifetime else None
        token = cls.objects.create(
            user=user, name=name, prefix=text[:8], sha256=cls.digest(text), expires_at=expires_at, reads_only=reads_only
        )
        return token, text

    @classmethod
    def authenticate(cls, text: str) -> ApiToken | None:
        """The live token with this text, or None; remembers when it was last used, to the minute."""
        token = cls.objects.select_related("user").filter(sha256=cls.digest(text)).first()
        now = timezone.now()
        if token is None or not token.user.is_active or (token.expires_at and token.expires_at <= now):
            return None
        if token.last_used_at is None or now - token.last_used_at > timedelta(minutes=1):
            token.mark_used(now)
        return token

    @staticmethod
    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    def mark_used(self, now: datetime) -> None:
        self.last_used_at = now
        self.save(update_fields=["last_used_at"])


class FailedSignIn(models.Model):
    """Failed sign-ins of one name from one address, until `ends_at`. `key` is a digest of both."""

    key = models.CharField(max_length=64, primary_key=True)
    count = models.PositiveIntegerField(default=0)
    ends_at = models.DateTimeField(db_index=True)
