"""Making and stopping sweeps. Which combinations there are is in webapp/runs/sweeps.py, how well they did in results.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.db import transaction

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.accounts.permissions import Action, can
from webapp.audit import log
from webapp.runs import lifecycle, services, sweeps
from webapp.runs.models import LIVE, Run
from webapp.runs.problems import Problem
from webapp.sweeps.models import Sweep, Trial


@dataclass(frozen=True)
class Plan:
    """What is to be swept. `count` None is the whole grid. Empty `name`: made from the base and the axes."""

    axes: Mapping[str, sweeps.Axis]
    count: int | None = None
    seed: int = 0
    name: str = ""
    metric: str = "reward"
    goal: str = Sweep.Goal.MAX


def combine(base: RunSpec, plan: Plan) -> tuple[list[RunSpec], list[dict[str, Any]], list[Problem]]:
    """The specs of a sweep with the values that are special about each, or what is wrong; cheap, and nothing is made."""
    try:
        places = sweeps.points(plan.axes, plan.count, plan.seed)
    except ValueError as error:
        return [], [], [Problem("", f"{str(error)[0].upper()}{str(error)[1:]}.")]
    specs, problems = sweeps.specs(base, places)
    if problems:
        return [], [], problems
    dumps = [spec.model_dump(mode="json") for spec in specs]
    return specs, [{path: sweeps.value_at(dump, path) for path in plan.axes} for dump in dumps], []


def check(specs: Sequence[RunSpec], owner: User) -> list[Problem]:
    """What would keep any of the runs from starting, each problem once."""
    return list(dict.fromkeys(problem for spec in specs for problem in services.check_spec(spec, owner)))


@transaction.atomic
def create(base: Run, plan: Plan, specs: Sequence[RunSpec], places: Sequence[Mapping[str, Any]], owner: User, *,
           launch: bool) -> Sweep:  # fmt: skip
    """Make the runs that `combine` gave, and queue them with `launch`: they run as devices become free. All or nothing."""
    axes = {path: asdict(axis) if isinstance(axis, sweeps.Range) else list(axis) for path, axis in plan.axes.items()}
    sweep = Sweep.objects.create(
        name=plan.name or f"{base.name[:80]}: {', '.join(path.rpartition('.')[2] for path in axes)}"[:120], owner=owner,
        base=base, axes=axes, seed=plan.seed, metric=plan.metric, goal=plan.goal,
        method=Sweep.Method.GRID if plan.count is None else Sweep.Method.RANDOM,
    )  # fmt: skip
    log.record(owner, "sweep.created", f"{len(specs)} runs over {', '.join(axes)}.", sweep)
    for number, (spec, place) in enumerate(zip(specs, places, strict=True), 1):
        run = services.create_run(spec, owner, parent=base)
        Trial.objects.create(sweep=sweep, run=run, number=number, place=place)
        if launch:
            lifecycle.launch(run, owner)
    return sweep


def stop(sweep: Sweep, actor: User, *, save: bool) -> int:
    """Ask every live run of the sweep to end; queued ones leave the queue at once. Returns how many."""
    stopped = 0
    log.record(actor, "sweep.stopped", "Every run was asked to stop.", sweep)
    for run in Run.objects.filter(trial__sweep=sweep, state__in=LIVE).select_related("owner"):
        if not can(actor, Action.RUN, run):
            continue
        try:
            lifecycle.stop(run, actor, save=save)
        except lifecycle.Refused:
            continue  # it ended meanwhile
        stopped += 1
    return stopped
