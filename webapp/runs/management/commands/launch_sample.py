"""Launch the sample run when there is no run yet."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from webapp.accounts.models import User
from webapp.runs import lifecycle, services
from webapp.runs.models import Run
from webapp.runs.sample import sample_spec


class Command(BaseCommand):
    help = "Launch the sample run if there are no runs yet."

    def handle(self, *args: Any, **options: Any) -> None:
        if Run.objects.exists():
            self.stdout.write("There are runs already; the sample run was not launched.")
            return
        owner = User.objects.filter(is_active=True).order_by("-is_superuser", "pk").first()
        if owner is None:
            raise CommandError("There is no account to own the sample run; run 'manage.py ensure_admin' first.")
        spec = sample_spec()
        if problems := services.check_spec(spec, owner):
            raise CommandError("The sample run can't start: " + " ".join(problem.message for problem in problems))
        run = services.create_run(spec, owner)
        lifecycle.launch(run, owner)
        self.stdout.write(f"Launched the sample run {run.pk}.")
