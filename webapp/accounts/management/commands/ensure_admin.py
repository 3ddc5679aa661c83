"""Make the first account."""

from __future__ import annotations

import secrets
from typing import Any

from django.core.management.base import BaseCommand

from webapp.accounts.models import User


class Command(BaseCommand):
    help = "Create the account 'admin' with a random password, printed once; does nothing if there is any account."

    def handle(self, *args: Any, **options: Any) -> None:
        if User.objects.exists():
            return
        password = secrets.token_urlsafe(12)
        User.objects.create_superuser("admin", password=password, must_change_password=True)
        self.stdout.write(
            f"First account: admin   password: {password}   (shown only now; you will be asked to change it)"
        )
