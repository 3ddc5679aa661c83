"""The form of a run: new, from a clone, from YAML, a draft; checked while somebody types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.text import slugify
from django.views.decorators.http import require_http_methods, require_POST
from pydantic import ValidationError

from trainer_core.spec import RewardSpec, RunSpec
from webapp.accounts.permissions import Action, require, user_of
from webapp.checkpoints.models import Checkpoint
from webapp.rewards.models import RewardFunction
from webapp.runs import checks, forking, forms, hub, lifecycle, precision, prelaunch, previews, services
from webapp.runs.models import Run, State
from webapp.runs.problems import Problem, from_pydantic
from webapp.runs.sample import sample_spec

MAX_YAML = 1_000_000
"""Characters of an imported spec."""


def _parent(request: HttpRequest) -> Run | None:
    """The run that this one is cloned from, named by `from`."""
    text = request.POST.get("from") or request.GET.get("from")
    if not text:
        return None
    try:
        return get_object_or_404(Run, pk=UUID(text))
    except ValueError:
        return None


def _fork(request: HttpRequest, parent: Run | None) -> Checkpoint | None:
    """The checkpoint of the parent that a fork begins with, named by `checkpoint`."""
    text = request.POST.get("checkpoint") or request.GET.get("checkpoint") or ""
    if parent is None or not text.isdigit():
        return None
    return get_object_or_404(parent.checkpoints.select_related("run"), pk=text, deleted_at=None)


def _get_draft(request: HttpRequest, run_id: UUID) -> Run:
    run = get_object_or_404(Run, pk=run_id)
    require(user_of(request), Action.RUN, run)
    return run


@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    parent = _parent(request)
    if request.method == "POST":
        return _handle(request, None, parent)
    if parent:
        spec = parent.run_spec()
        word = "fork" if _fork(request, parent) else "copy"
        spec = spec.model_copy(update={"name": f"{spec.name[:110]} ({word})"})
    elif reward := request.GET.get("reward"):
        spec = _with_reward(reward)
    else:
        spec = precision.fitted(sample_spec() if request.GET.get("preset") == "sample" else RunSpec())
    return _page(request, forms.from_spec(spec), parent=parent)


def _with_reward(name: str) -> RunSpec:
    """The sample's settings, small enough to try something, with a reward function written here."""
    get_object_or_404(RewardFunction, name=name)
    spec = precision.fitted(sample_spec())
    return spec.model_copy(
        update={"name": f"{name}: first try", "rewards": [RewardSpec(name=name)], "tags": [], "notes": ""}
    )


@require_http_methods(["GET", "POST"])
def edit(request: HttpRequest, run_id: UUID) -> HttpResponse:
    run = _get_draft(request, run_id)
    if run.state != State.DRAFT:
        messages.error(request, f"The run is {run.state}; only a draft can be changed. Clone it instead.")
        return redirect("runs:detail", run.pk)
    if request.method == "POST":
        return _handle(request, run, run.parent)
    return _page(request, forms.from_spec(run.run_spec()), run=run, parent=run.parent)


@require_POST
def check(request: HttpRequest) -> JsonResponse:
    """What the form shows while somebody types: problems by field, what a step will be, how it differs from its parent."""
    spec, problems = forms.validate(request.POST)
    answer: dict[str, Any] = {"facts": [], "prompts": [], "diff": [], "commands": []}
    if spec is not None:
        problems, inside = checks.examine(spec, user_of(request))
        if checkpoint := _fork(request, _parent(request)):
            problems = [*forking.problems(spec, checkpoint), *problems]
        answer["facts"] = [*previews.facts(spec), *previews.data_facts(spec, inside)]
        answer["commands"] = previews.commands(spec)
        if not any(problem.field.startswith("data") for problem in problems):
            try:
                answer["prompts"] = previews.prompts(spec, inside)
            except ValueError as error:
                problems.append(Problem("data.source", f"{spec.data.source}: {error}."))
        counts = [prompt["tokens"] for prompt in answer["prompts"] if prompt["tokens"] is not None]
        answer["before"] = prelaunch.before_launch(
            spec, max(counts, default=None), hub.access_of(spec, user_of(request))
        )
        if parent := _parent(request):
            changes = forms.spec_diff(parent.spec, services.pin_rewards(spec).model_dump(mode="json"))
            answer["diff"] = [{"path": path, "before": before, "after": after} for path, before, after in changes]
    if request.POST.get("suggest"):
        answer["datasets"] = previews.datasets()
    answer["problems"] = [asdict(problem) for problem in problems]
    return JsonResponse(answer)


def _handle(request: HttpRequest, run: Run | None, parent: Run | None) -> HttpResponse:
    action = request.POST.get("action", "launch")
    if action == "import":
        return _import(request, run, parent)
    if action == "add-reward":
        return _page(request, _with_reward_row(request.POST), run=run, parent=parent)
    spec, problems = forms.validate(request.POST)
    if spec is not None and action == "export":
        return yaml_response(spec)
    checkpoint = _fork(request, parent) if run is None else None
    if spec is not None and action == "launch":
        problems = services.check_spec(spec, run.owner if run else user_of(request))
    if spec is not None and checkpoint is not None:
        problems = [*problems, *forking.problems(spec, checkpoint)]
    if spec is None or problems:
        return _page(request, forms.from_post(request.POST, problems), run=run, parent=parent, status=422)
    if run is None:
        run = services.create_run(spec, user_of(request), parent=parent, checkpoint=checkpoint)
        return _stored(request, run, launch=action == "launch")
    return _update(request, spec, run, launch=action == "launch")


def _update(request: HttpRequest, spec: RunSpec, run: Run, *, launch: bool) -> HttpResponse:
    if run.forked_step is not None and not forking.same_weights(spec, run.run_spec()):
        problem = "This draft begins with the weights of a checkpoint, so its model and LoRA settings stay as they are."
        return _page(
            request, forms.from_post(request.POST, [Problem("", problem)]), run=run, parent=run.parent, status=422
        )
    if not services.update_draft(run, spec, user_of(request)):
        messages.error(request, "The run was launched meanwhile, so it was not changed.")
        return redirect("runs:detail", run.pk)
    run.refresh_from_db()
    return _stored(request, run, launch=launch)


def _stored(request: HttpRequest, run: Run, *, launch: bool) -> HttpResponse:
    user = user_of(request)
    if launch:
        try:
            lifecycle.launch(run, user)
        except lifecycle.Refused as refusal:
            messages.error(request, str(refusal))
    else:
        messages.success(request, "Saved as a draft; nothing has started.")
    return redirect("runs:detail", run.pk)


def _import(request: HttpRequest, run: Run | None, parent: Run | None) -> HttpResponse:
    """Fill the form from YAML, pasted or uploaded; what can't be used leaves the form as it was."""
    upload = request.FILES.get("yaml_file")
    text = upload.read(MAX_YAML + 1).decode("utf-8", errors="replace") if upload else request.POST.get("yaml", "")
    try:
        if len(text) > MAX_YAML:
            raise ValueError(f"the text is longer than {MAX_YAML:,} characters")
        spec = RunSpec.from_yaml(text)
    except ValidationError as error:
        problems = [Problem("", f"YAML, {item.field or 'whole'}: {item.message}") for item in from_pydantic(error)]
    except ValueError as error:
        problems = [Problem("", f"YAML: {error}.")]
    else:
        messages.success(request, f"Filled in from YAML: {spec.name}. Nothing is saved yet.")
        return _page(request, forms.from_spec(spec), run=run, parent=parent)
    return _page(request, forms.from_post(request.POST, problems), run=run, parent=parent, yaml=text, status=422)


def _with_reward_row(post: QueryDict) -> forms.SpecForm:
    form = forms.from_post(post, [])
    form.rewards.append(forms.empty_reward_row(len(form.rewards)))
    return form


def _page(
    request: HttpRequest, form: forms.SpecForm, *, run: Run | None = None, parent: Run | None = None, yaml: str = "",
    status: int = 200,
) -> HttpResponse:  # fmt: skip
    context = {
        "form": form, "run": run, "parent": parent, "yaml": yaml, "checkpoint": None if run else _fork(request, parent),
        "reward_choices": forms.reward_choices(),
        "empty_row": forms.empty_reward_row("__index__"),
    }  # fmt: skip
    return render(request, "runs/form.html", context, status=status)


def yaml_response(spec: RunSpec) -> HttpResponse:
    """The spec as a file to download."""
    response = HttpResponse(spec.to_yaml(), content_type="application/yaml; charset=utf-8")
    response.headers["Content-Disposition"] = f'attachment; filename="{slugify(spec.name) or "run"}.yaml"'
    return response
