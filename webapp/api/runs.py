"""Runs: list, make, steer; their events, rollouts and logs."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import Http404, HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status
from pydantic import ValidationError

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.accounts.permissions import user_of
from webapp.api.auth import get_own_run, get_run
from webapp.api.errors import Invalid
from webapp.api.schemas import (
    ArchiveIn,
    CloneIn,
    DescribeIn,
    Detail,
    EventOut,
    ForkIn,
    Id,
    LogFile,
    LogPiece,
    Problems,
    RangeIn,
    ResumeIn,
    RolloutOut,
    RunIn,
    RunList,
    RunOut,
    SpecChecked,
    SpecIn,
    StopIn,
    SweepIn,
    TokensOut,
)
from webapp.checkpoints import files
from webapp.checkpoints.models import Checkpoint
from webapp.rollouts.queries import Search
from webapp.runs import describing, forking, lifecycle, logs, services, sweeps
from webapp.runs.diagnosis import diagnosis_of
from webapp.runs.models import Run
from webapp.runs.problems import Problem, from_pydantic
from webapp.runs.queries import RunFilter, list_runs
from webapp.sweeps import services as sweep_services
from webapp.sweeps.models import Trial
from webapp.sweeps.services import Plan

router = Router(tags=["runs"])
ERRORS = {401: Detail, 403: Detail, 404: Detail, 409: Detail, 422: Problems}


@router.get("/runs", response={200: RunList, 422: Detail})
def list_(
    request: HttpRequest, state: Annotated[list[str], Query()] = [], search: str = "", tag: str = "", owner: str = "",  # noqa: B006
    archived: bool = False, sort: str = "-created", page: int = 1, per_page: int = 50,
) -> dict[str, Any]:  # fmt: skip
    """Runs by page. `state` may be repeated and may be `live`; `sort` takes a minus for descending."""
    try:
        wanted = RunFilter(tuple(state), search, tag, owner, archived, sort, page, per_page)
    except ValueError as error:
        raise Invalid(str(error)) from error
    found = list_runs(wanted)
    return {
        "items": [as_row(run, getattr(run, "model", "")) for run in found.runs], "total": found.total, "page": found.page,
        "pages": found.pages, "states": found.states,
    }  # fmt: skip


@router.post("/runs", response={201: RunOut, **ERRORS})
def create(request: HttpRequest, body: RunIn) -> Status[Any]:
    """Make a draft, and queue it with `launch`. Checked first, as the form does; nothing is made when something is wrong."""
    return Status(201, as_out(request, _create(request, parse_spec(body), launch=body.launch)))


@router.get("/runs/{uuid:run_id}", response={200: RunOut, 404: Detail})
def get(request: HttpRequest, run_id: UUID) -> dict[str, Any]:
    return as_out(request, get_run(run_id))


@router.patch("/runs/{uuid:run_id}", response={200: RunOut, **ERRORS})
def describe(request: HttpRequest, run_id: UUID, body: DescribeIn) -> dict[str, Any]:
    """Change name, tags or notes, in any state."""
    run = get_own_run(request, run_id)
    try:
        describing.describe(run, user_of(request), name=body.name, tags=body.tags, notes=body.notes)
    except ValidationError as error:
        raise Invalid.of(from_pydantic(error)) from error
    except lifecycle.Refused as refusal:
        raise Invalid(str(refusal)) from refusal
    return as_out(request, run)


@router.post("/runs/{uuid:run_id}/launch", response={200: RunOut, **ERRORS})
def launch(request: HttpRequest, run_id: UUID) -> dict[str, Any]:
    """Queue a draft. 409 when it is none."""
    run = get_own_run(request, run_id)
    check(run.run_spec(), run.owner)
    lifecycle.launch(run, user_of(request))
    return as_out(request, run)


@router.post("/runs/{uuid:run_id}/stop", response={200: RunOut, **ERRORS})
def stop(request: HttpRequest, run_id: UUID, body: StopIn = StopIn(save=False)) -> dict[str, Any]:
    """Ask for an end; the state follows within seconds. 409 when it is not live."""
    run = get_own_run(request, run_id)
    lifecycle.stop(run, user_of(request), save=body.save)
    return as_out(request, run)


@router.post("/runs/{uuid:run_id}/resume", response={200: RunOut, **ERRORS})
def resume(request: HttpRequest, run_id: UUID, body: ResumeIn = ResumeIn(checkpoint=None)) -> dict[str, Any]:
    """Queue a new attempt of an ended run, checked again as at its launch. 409 when it is live."""
    run = get_own_run(request, run_id)
    if lifecycle.can_resume(run):
        check(run.run_spec(), run.owner)
    lifecycle.resume(run, user_of(request), get_checkpoint(run, body.checkpoint))
    return as_out(request, run)


@router.post("/runs/{uuid:run_id}/archive", response={200: RunOut, **ERRORS})
def archive(request: HttpRequest, run_id: UUID, body: ArchiveIn = ArchiveIn()) -> dict[str, Any]:
    """Take an ended run out of the list, or put it back."""
    run = get_own_run(request, run_id)
    services.set_archived(run, user_of(request), body.archived)
    return as_out(request, run)


@router.post("/runs/{uuid:run_id}/clone", response={201: RunOut, **ERRORS})
def clone(request: HttpRequest, run_id: UUID, body: CloneIn = CloneIn(spec=None, yaml=None)) -> Status[Any]:
    """A new draft with the run's spec, or with a changed one. Anybody may clone what they can see."""
    parent = get_run(run_id)
    spec = parent.run_spec() if body.spec is None and body.yaml is None else parse_spec(body)
    return Status(201, as_out(request, _create(request, spec, launch=False, parent=parent)))


@router.post("/runs/{uuid:run_id}/fork", response={201: RunOut, **ERRORS})
def fork(
    request: HttpRequest, run_id: UUID, body: ForkIn = ForkIn(spec=None, yaml=None, checkpoint=None, launch=False)
) -> Status[Any]:
    """A new run that begins at step 0 with the weights of a checkpoint. Model and LoRA shape must stay; the rest may change."""
    parent = get_run(run_id)
    checkpoint = get_checkpoint(parent, body.checkpoint) or newest_checkpoint(parent)
    if checkpoint is None:
        raise Invalid(f"{parent.name} has no checkpoint to fork from; clone it to begin with the base model.")
    spec = parent.run_spec() if body.spec is None and body.yaml is None else parse_spec(body)
    if problems := forking.problems(spec, checkpoint):
        raise Invalid.of(problems)
    return Status(201, as_out(request, _create(request, spec, launch=body.launch, checkpoint=checkpoint)))


@router.post("/runs/{uuid:run_id}/sweep", response={201: list[RunOut], **ERRORS})
def sweep(request: HttpRequest, run_id: UUID, body: SweepIn) -> Status[Any]:
    """Runs with this run's settings, varied along axes. All are checked first; nothing is made when one could not start."""
    parent = get_run(run_id)
    try:
        axes = {
            path: sweeps.Range(**axis.dict(), whole=sweeps.is_whole(path)) if isinstance(axis, RangeIn) else axis
            for path, axis in body.axes.items()
        }
    except ValueError as error:
        raise Invalid(f"{str(error)[0].upper()}{str(error)[1:]}.") from error
    plan = Plan(axes, body.count, body.seed, body.name, body.metric, body.goal)
    made, places, problems = sweep_services.combine(parent.run_spec(), plan)
    if problems := problems or sweep_services.check(made, user_of(request)):
        raise Invalid.of(problems)
    found = sweep_services.create(parent, plan, made, places, user_of(request), launch=body.launch)
    trials = found.trials.select_related("run__owner", "run__parent")
    return Status(201, [as_out(request, trial.run) for trial in trials])


@router.delete("/runs/{uuid:run_id}", response={204: None, **ERRORS})
def delete(request: HttpRequest, run_id: UUID) -> Status[None]:
    """Delete a run with its checkpoints, rollouts and logs. 409 while it is live."""
    services.delete_run(get_own_run(request, run_id), user_of(request))
    return Status(204, None)


@router.get("/spec/schema", response=dict, tags=["spec"])
def spec_schema(request: HttpRequest) -> dict[str, Any]:
    """JSON schema of a run's spec."""
    return RunSpec.model_json_schema()


@router.post("/spec/validate", response={200: SpecChecked, 401: Detail, 422: Detail}, tags=["spec"])
def spec_validate(request: HttpRequest, body: SpecIn) -> dict[str, Any]:
    """Everything that is wrong with a spec, and what is allowed; nothing is made."""
    try:
        spec = parse_spec(body)
    except Invalid as error:
        return {"valid": False, "problems": services.as_json(error.problems), "spec": None, "yaml": None}
    problems = services.as_json(services.check_spec(spec, user_of(request)))
    return {
        "valid": not problems, "problems": problems, "spec": spec.model_dump(mode="json"), "yaml": spec.to_yaml(),
    }  # fmt: skip


@router.get("/runs/{uuid:run_id}/events", response={200: list[EventOut], 404: Detail})
def events(
    request: HttpRequest, run_id: UUID, after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Any:  # fmt: skip
    """Events with an id above `after`, oldest first."""
    found = get_run(run_id).events.filter(pk__gt=after).select_related("attempt", "actor").order_by("id")
    return list(found[:limit])


@router.get("/runs/{uuid:run_id}/rollouts", response={200: list[RolloutOut], 404: Detail})
def rollouts(
    request: HttpRequest, run_id: UUID, after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    step: Annotated[int | None, Query(ge=-(2**62), le=2**62)] = None, group: str = "",
    limit: Annotated[int, Query(ge=1, le=500)] = 100, search: str = "",
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
) -> Any:  # fmt: skip
    """Stored rollouts with an id above `after`: of one weight version or group, with these words and rewards, if asked."""
    found = get_run(run_id).rollouts.filter(pk__gt=after).select_related("attempt").defer("text").order_by("id")
    found = Search(search, min_reward=min_reward, max_reward=max_reward).apply(found)
    if step is not None:
        found = found.filter(step=step)
    if group:
        found = found.filter(group_id=group)
    return list(found[:limit])


@router.get("/runs/{uuid:run_id}/rollouts/{int:rollout_id}/tokens", response={200: list[TokensOut], 404: Detail})
def rollout_tokens(request: HttpRequest, run_id: UUID, rollout_id: Id) -> list[dict[str, Any]]:
    """Tokens of a rollout, one item for each of its sequences; empty for most, since a step stores those of some."""
    rollout = get_run(run_id).rollouts.filter(pk=rollout_id).first()
    if rollout is None:
        raise Http404(f"The run has no rollout {rollout_id}.")
    return [item.data for item in rollout.tokens.order_by("sequence")]


@router.get("/runs/{uuid:run_id}/logs", response={200: list[LogFile], 404: Detail})
def log_list(request: HttpRequest, run_id: UUID) -> list[dict[str, Any]]:
    """Log files of all attempts, the newest attempt first."""
    return [
        {"attempt": attempt.number, "name": path.name, "size": path.stat().st_size}
        for attempt in get_run(run_id).attempts.order_by("-number")
        for path in logs.log_files(attempt)
    ]


@router.get("/runs/{uuid:run_id}/logs/{int:attempt}/{name}", response={200: LogPiece, 404: Detail})
def log(
    request: HttpRequest, run_id: UUID, attempt: Id, name: str, after: Annotated[int | None, Query(ge=0)] = None
) -> dict[str, Any]:
    """The end of a log; or, with `after` (the `end` of the last answer), what came since."""
    found = get_run(run_id).attempts.filter(number=attempt).first()
    path = next((path for path in logs.log_files(found) if path.name == name), None) if found else None
    if path is None:
        raise Http404(f"Attempt {attempt} has no log of this name.")
    return (logs.read_end(path) if after is None else logs.read_after(path, after)).as_json()


def parse_spec(body: SpecIn) -> RunSpec:
    """Raises Invalid, with one problem for each field that is wrong."""
    if (body.spec is None) == (body.yaml is None):
        raise Invalid("Give the spec either as 'spec', an object, or as 'yaml', a text.")
    try:
        return RunSpec.model_validate(body.spec) if body.yaml is None else RunSpec.from_yaml(body.yaml)
    except ValidationError as error:
        raise Invalid.of(from_pydantic(error)) from error
    except ValueError as error:
        raise Invalid.of([Problem("", f"{error}.")]) from error


def get_checkpoint(run: Run, checkpoint_id: int | None) -> Checkpoint | None:
    """The run's checkpoint of this id; None for None. Raises Http404."""
    files.mark_deleted(run)
    if checkpoint_id is None:
        return None
    found = run.checkpoints.select_related("run").filter(pk=checkpoint_id).first()
    if found is None:
        raise Http404(f"The run has no checkpoint {checkpoint_id}.")
    return found


def newest_checkpoint(run: Run) -> Checkpoint | None:
    return run.checkpoints.select_related("run").filter(deleted_at=None).order_by("-attempt__number", "-step").first()


def check(spec: RunSpec, owner: User) -> None:
    """Raises Invalid when the run could not start."""
    if problems := services.check_spec(spec, owner):
        raise Invalid.of(problems)


def _create(
    request: HttpRequest,
    spec: RunSpec,
    *,
    launch: bool,
    parent: Run | None = None,
    checkpoint: Checkpoint | None = None,
) -> Run:
    check(spec, user_of(request))
    run = services.create_run(spec, user_of(request), parent=parent, checkpoint=checkpoint)
    if launch:
        lifecycle.launch(run, user_of(request))
    return run


def as_row(run: Run, model: str) -> dict[str, Any]:
    """A run for RunRow."""
    columns = (
        "id", "name", "state", "reason", "tags", "summary", "archived", "created_at", "queued_at", "started_at", "ended_at",
    )  # fmt: skip
    return {"owner": run.owner.username, "model": model, **{name: getattr(run, name) for name in columns}}


def as_out(request: HttpRequest, run: Run) -> dict[str, Any]:
    """A run for RunOut."""
    return {
        **as_row(run, run.spec.get("model", {}).get("path", "")), "parent": run.parent_id,
        "sweep": Trial.objects.filter(run=run).values_list("sweep_id", flat=True).first(),
        "forked_step": run.forked_step, "live": run.is_live,
        "desired": run.desired, "spec": run.spec, "diagnosis": diagnosis_of(run),
        "attempts": list(
            run.attempts.select_related("host").prefetch_related("followers__host", "servers").order_by("number")
        ),
        "url": request.build_absolute_uri(reverse("runs:detail", args=[run.pk])),
    }  # fmt: skip
