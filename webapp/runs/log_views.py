"""The logs of a run's attempts: a page, and the pieces that it tails."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from webapp.accounts.models import User
from webapp.checkpoints.files import File, send_file
from webapp.runs import logs
from webapp.runs import page as run_page
from webapp.runs.models import Attempt, Run

MAX_SEARCH = 200


def _get_log(run: Run, request: HttpRequest) -> tuple[Attempt | None, list[Path], Path | None]:
    """The attempt, its logs and the log that the query names; the newest attempt and the first log by default."""
    number = request.GET.get("attempt", "")
    attempts = run.attempts.order_by("-number")
    attempt = attempts.filter(number=number).first() if number.isdigit() else attempts.first()
    if attempt is None:
        if number:
            raise Http404(f"There is no attempt {number}.")
        return None, [], None
    files = logs.log_files(attempt)
    wanted = request.GET.get("file", "")
    chosen = next((path for path in files if path.name == wanted), None)
    return attempt, files, chosen or (files[0] if files and not wanted else None)


@require_safe
def page(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)
    assert isinstance(request.user, User)
    attempt, files, chosen = _get_log(run, request)
    context = {
        "run": run, "tab": "logs", "head": run_page.head(run, request.user), "attempts": run.attempts.order_by("-number"),
        "attempt": attempt, "files": [path.name for path in files], "chosen": chosen.name if chosen else "",
    }  # fmt: skip
    return render(request, "runs/logs.html", context)


@require_safe
def data(request: HttpRequest, run_id: UUID) -> JsonResponse:
    """A piece of a log: its end, what came `after` a byte, or what is `before` one.

    With `search`: lines that show this text, from byte `after` on; `next` says where to search on.
    """
    run = get_object_or_404(Run, pk=run_id)
    _, _, path = _get_log(run, request)
    if path is None:
        raise Http404("There is no such log.")
    after, before = request.GET.get("after", ""), request.GET.get("before", "")
    if words := request.GET.get("search", "").strip()[:MAX_SEARCH]:
        return JsonResponse(logs.search(path, words, int(after) if after.isdigit() else 0).as_json())
    if after.isdigit():
        piece = logs.read_after(path, int(after))
    elif before.isdigit():
        piece = logs.read_before(path, int(before))
    else:
        piece = logs.read_end(path)
    return JsonResponse({**piece.as_json(), "live": run.is_live})


@require_safe
def file(request: HttpRequest, run_id: UUID) -> HttpResponseBase:
    """The whole log as a download."""
    run = get_object_or_404(Run, pk=run_id)
    attempt, _, path = _get_log(run, request)
    if attempt is None or path is None:
        raise Http404("There is no such log.")
    name = f"run-{str(run.pk)[:8]}-attempt-{attempt.number}-{path.name}"
    return send_file(request, File(name, path, path.stat().st_size, "model"))
