"""An API token from the command line, for scripts on this machine."""

from datetime import timedelta

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.accounts.models import ApiToken, User
from webapp.audit import log


class Command(BaseCommand):
    help = "Print a new API token of a user. It can't be read again later."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("--name", default="command line", help="how the token is listed")
        parser.add_argument("--days", type=int, help="days until it expires (default: never)")

    def handle(self, *args: object, **options: str | int | None) -> None:
        user = User.objects.filter(username=options["username"]).first()
        if user is None:
            names = ", ".join(User.objects.values_list("username", flat=True)) or "none"
            raise CommandError(f"No account {options['username']!r}; there are: {names}.")
        days = options["days"]
        lifetime = timedelta(days=int(days)) if days else None
        token, text = ApiToken.create(user, str(options["name"]), lifetime)
        log.record(None, "token.created", f"{token.prefix}… of {user.username}, made on the command line.", token)
        self.stdout.write(text)
