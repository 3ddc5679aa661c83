"""Pages of runs: the list, a run's own pages and what one can do with it."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe
from pydantic import ValidationError

from webapp.accounts.models import User
from webapp.accounts.permissions import Action, require, user_of
from webapp.checkpoints import files
from webapp.fragments import unless_seen
from webapp.metrics.overview import charts_of
from webapp.runs import alerts, describing, editing, forms, lifecycle, queries, services
from webapp.runs import page as run_page
from webapp.runs.diagnosis import diagnosis_of
from webapp.runs.models import LIVE, Run, State
from webapp.runs.problems import from_pydantic
from webapp.templatetags.offbeat import plural

EVENTS_SHOWN = 8
EVENTS_A_PAGE = 100
RUNS_A_PAGE = 50
COLUMNS = (
    ("name", "Name", "text"), ("state", "State", "text"), ("model", "Model", "text"), ("reward", "Reward", "num"),
    ("step", "Step", "num"), ("tok_s", "tok/s", "num"), ("staleness", "Staleness", "num"), ("created", "Age", "num"),
)  # fmt: skip
"""Sort key, heading and kind of each column of the list."""
BULK: dict[str, Callable[[Run, User], None]] = {
    "stop": lambda run, user: lifecycle.stop(run, user, save=True),
    "archive": lambda run, user: services.set_archived(run, user, True),
    "unarchive": lambda run, user: services.set_archived(run, user, False),
    "delete": services.delete_run,
}
"""What the list does to each chosen run; tagging has a word to go with it."""
BULK_DONE = {
    "tag": "Tagged",
    "stop": "Asked to stop",
    "archive": "Archived",
    "unarchive": "Put back",
    "delete": "Deleted",
}


def _get_run(run_id: UUID) -> Run:
    return get_object_or_404(Run.objects.select_related("owner", "parent"), pk=run_id)


def _get_own_run(request: HttpRequest, run_id: UUID) -> Run:
    run = _get_run(run_id)
    require(user_of(request), Action.RUN, run)
    return run


def _act(request: HttpRequest, run: Run, action: Callable[[], object], success: str = "") -> HttpResponse:
    """Do something with a run; a refusal becomes a message."""
    try:
        action()
    except lifecycle.Refused as refusal:
        messages.error(request, str(refusal))
    else:
        if success:
            messages.success(request, success)
    return redirect("runs:detail", run.pk)


@require_safe
def run_list(request: HttpRequest) -> HttpResponse:
    """The table of runs. The page asks again for `fragment=1`, and gets 204 while nothing has changed."""
    states = tuple(state for state in request.GET.getlist("state") if state)
    page = request.GET.get("page", "1")
    values = {name: request.GET.get(name, "") for name in ("search", "tag", "owner")}
    archived = request.GET.get("archived") == "1"
    try:
        wanted = queries.RunFilter(
            states=states, archived=archived, sort=request.GET.get("sort") or "-created",
            page=int(page) if page.isdigit() else 1, per_page=RUNS_A_PAGE, **values,
        )  # fmt: skip
    except ValueError as error:
        messages.error(request, str(error))
        return redirect("runs:list")
    found = queries.list_runs(wanted)
    context = {
        "found": found, "wanted": wanted, "columns": _columns(wanted.sort), "any_runs": sum(found.states.values()) > 0,
        "filtered": bool(states or any(values.values())), "owners": queries.owners(),
        "now_live": any(run.is_live for run in found.runs),
        "choices": [("live", "live", sum(found.states.get(state, 0) for state in LIVE))]
        + [(state, state, found.states.get(state, 0)) for state in State.values],
    }  # fmt: skip
    if not request.GET.get("fragment"):
        return render(request, "runs/list.html", context)
    return unless_seen(request, render_to_string("runs/table.html", context, request=request))


def _columns(sort: str) -> list[dict[str, str]]:
    """Headings with what a click sorts by: numbers and times descending first, words ascending."""
    columns = []
    for key, title, kind in COLUMNS:
        down = sort == f"-{key}"
        current = sort.removeprefix("-") == key
        first = key if kind == "text" else f"-{key}"
        turned = key if down else f"-{key}"
        columns.append({
            "title": title, "kind": kind, "sort": turned if current else first,
            "aria": ("descending" if down else "ascending") if current else "",
        })  # fmt: skip
    return columns


@require_POST
def bulk(request: HttpRequest) -> HttpResponse:
    """Compare, tag, stop, archive or delete the chosen runs; what is refused is said, the others are done."""
    action = request.POST.get("action", "")
    if action == "compare":
        chosen = urlencode([("run", str(pk)) for pk in queries.run_ids(request.POST.getlist("run"))])
        return redirect(f"{reverse('runs:compare')}?{chosen}")
    tags = [tag for tag in describing.tags_in(request.POST.get("tag", "")) if tag.strip()]
    deeds = {**BULK, "tag": lambda run, user: describing.add_tags(run, user, tags)}
    if action not in deeds:
        messages.error(request, f"There is no action {action!r:.40}; there are compare, {', '.join(deeds)}.")
        return redirect("runs:list")
    if action == "tag" and not tags:
        messages.error(request, "Write the tag first.")
        return redirect("runs:list")
    user, done = user_of(request), 0
    for run in Run.objects.filter(pk__in=queries.run_ids(request.POST.getlist("run"))):
        if not services.may_change(user, run):
            messages.error(request, f"{run.name}: it belongs to somebody else.")
            continue
        try:
            deeds[action](run, user)
            done += 1
        except lifecycle.Refused as refusal:
            messages.error(request, f"{run.name}: {refusal}")
    if done:
        messages.success(request, f"{BULK_DONE[action]} {plural(done, 'run')}.")
    return redirect("runs:list")


@require_safe
def overview(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_run(run_id)
    context = {**_live_context(request, run, "overview"), "overview": charts_of(run.spec)}
    return render(request, "runs/overview.html", context)


@require_safe
def live(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """The changing parts of a run's page; 204 when they are what the browser has already."""
    run = _get_run(run_id)
    tab = request.GET.get("tab", "")
    context = {**_live_context(request, run, tab), "swap": True}
    return unless_seen(request, render_to_string("runs/live.html", context, request=request))


def _live_context(request: HttpRequest, run: Run, tab: str) -> dict[str, object]:
    context: dict[str, object] = {"run": run, "tab": tab, "head": run_page.head(run, user_of(request))}
    if tab == "overview":
        checkpoints = list(run.checkpoints.filter(deleted_at=None)[:5])
        context |= {
            "diagnosis": diagnosis_of(run) if run.state != State.DRAFT else None,
            "servers": run_page.servers(run),
            "alerts": alerts.open_events(run.current_attempt) if run.is_live else [],
            "events": run.events.select_related("actor").order_by("-id")[:EVENTS_SHOWN],
            "event_count": run.events.count(),
            "attempts": run.attempts.select_related("host", "resumed_from")
            .prefetch_related("followers__host")
            .order_by("-number"),
            "checkpoints": checkpoints,
            "evaluated": any(checkpoint.evaluation for checkpoint in checkpoints),
        }
    return context


@require_safe
def events(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_run(run_id)
    found = run.events.select_related("actor", "attempt").order_by("-id")
    page = Paginator(found, EVENTS_A_PAGE).get_page(request.GET.get("page"))
    context = {"run": run, "tab": "events", "head": run_page.head(run, user_of(request)), "page": page}
    return render(request, "runs/events.html", context)


@require_safe
def settings_page(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_run(run_id)
    spec = run.run_spec()
    context = {
        "run": run, "tab": "settings", "head": run_page.head(run, user_of(request)), "yaml": spec.to_yaml(),
        "changes": forms.spec_diff(run.parent.spec, run.spec) if run.parent else [],
        "children": run.children.order_by("-created_at")[:20],
    }  # fmt: skip
    return render(request, "runs/settings.html", context)


@require_safe
def spec_yaml(request: HttpRequest, run_id: UUID) -> HttpResponse:
    return editing.yaml_response(_get_run(run_id).run_spec())


@require_POST
def launch(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_own_run(request, run_id)
    if problems := services.check_spec(run.run_spec(), run.owner):
        for problem in problems:
            messages.error(request, problem.message)
        return redirect("runs:edit", run.pk)
    return _act(request, run, lambda: lifecycle.launch(run, user_of(request)))


@require_POST
def stop(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_own_run(request, run_id)
    save = request.POST.get("save") == "1"
    return _act(request, run, lambda: lifecycle.stop(run, user_of(request), save=save))


@require_POST
def resume(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_own_run(request, run_id)
    files.mark_deleted(run)
    chosen = request.POST.get("checkpoint", "")
    checkpoint = get_object_or_404(run.checkpoints, pk=chosen) if chosen.isdigit() else None
    problems = services.check_spec(run.run_spec(), run.owner) if lifecycle.can_resume(run) else []
    if problems:
        for problem in problems:
            messages.error(request, problem.message)
        return redirect("runs:detail", run.pk)
    return _act(request, run, lambda: lifecycle.resume(run, user_of(request), checkpoint))


@require_POST
def archive(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_own_run(request, run_id)
    archived = request.POST.get("archived") == "1"
    text = "Archived: it is out of the list, and nothing is deleted." if archived else "Back in the list."
    return _act(request, run, lambda: services.set_archived(run, user_of(request), archived), text)


@require_POST
def describe(request: HttpRequest, run_id: UUID) -> HttpResponse:
    """Change name, tags and notes; what is not sent stays."""
    run, sent = _get_own_run(request, run_id), request.POST
    same = sent.get("tags") in (None, ", ".join(run.tags))  # a tag of a spec may hold a comma
    tags = None if same else describing.tags_in(sent["tags"])
    notes = sent["notes"].replace("\r\n", "\n") if "notes" in sent else None
    try:
        changed = describing.describe(run, user_of(request), name=sent.get("name"), tags=tags, notes=notes)
    except lifecycle.Refused as refusal:
        messages.error(request, str(refusal))
    except ValidationError as error:
        for problem in from_pydantic(error):
            messages.error(request, f"Nothing is changed. {problem.field}: {problem.message}")
    else:
        if changed:
            messages.success(request, "Saved.")
    return redirect("runs:detail", run.pk)


@require_POST
def delete(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_own_run(request, run_id)
    name = run.name
    try:
        services.delete_run(run, user_of(request))
    except lifecycle.Refused as refusal:
        messages.error(request, str(refusal))
        return redirect("runs:detail", run.pk)
    messages.success(request, f"Deleted {name} with its checkpoints and logs.")
    return redirect("runs:list")
