"""Refuse to listen beyond this machine while that would be careless."""

import os

from django.core.management.base import BaseCommand, CommandError

from webapp.accounts.models import User


class Command(BaseCommand):
    help = "Fails with a sentence unless passwords were changed and allowed hosts are named."

    def handle(self, *args: object, **options: object) -> None:
        if not os.environ.get("OFFBEAT_ALLOWED_HOSTS"):
            raise CommandError(
                "OFFBEAT_BIND is not this machine's loopback, so OFFBEAT_ALLOWED_HOSTS must name the host names that "
                "browsers will use, separated by commas."
            )
        users = User.objects.filter(is_active=True)
        if not users.exists():
            raise CommandError("There is no account yet; run once on 127.0.0.1, log in and change the password first.")
        if unchanged := list(users.filter(must_change_password=True).values_list("username", flat=True)):
            raise CommandError(
                f"The printed password of {', '.join(unchanged)} was never changed; log in on 127.0.0.1 and change it first."
            )
