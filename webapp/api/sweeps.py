"""Sweeps: list, results, stop. POST /runs/<id>/sweep makes one (runs.py)."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import Http404, HttpRequest
from django.urls import reverse
from ninja import Query, Router

from webapp.accounts.permissions import Action, require, user_of
from webapp.api.schemas import Detail, StopIn, Stopped, SweepOut, SweepRow
from webapp.sweeps import services
from webapp.sweeps.models import Sweep
from webapp.sweeps.results import Results, results_of

router = Router(tags=["sweeps"])


@router.get("/sweeps", response={200: list[SweepRow], 422: Detail})
def sweeps(
    request: HttpRequest, offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Any:  # fmt: skip
    """Sweeps, the newest first."""
    found = Sweep.objects.select_related("owner")[offset : offset + limit]
    return [_as_row(request, results_of(sweep)) for sweep in found]


@router.get("/sweeps/{uuid:sweep_id}", response={200: SweepOut, 404: Detail})
def sweep(request: HttpRequest, sweep_id: UUID) -> Any:
    """One sweep with the values and the outcome of each run."""
    results = results_of(get_sweep(sweep_id))
    trials = [
        {"number": row.number, "run": row.run.pk, "state": row.run.state, "place": row.place, "final": row.final,
         "best": row.best} for row in results.rows
    ]  # fmt: skip
    return {**_as_row(request, results), "trials": trials}


@router.post("/sweeps/{uuid:sweep_id}/stop", response={200: Stopped, 403: Detail, 404: Detail, 422: Detail})
def stop_sweep(request: HttpRequest, sweep_id: UUID, body: StopIn = StopIn(save=False)) -> dict[str, int]:
    """Ask every live run of the sweep to end; those that wait leave the queue at once."""
    found = get_sweep(sweep_id)
    require(user_of(request), Action.RUN, found)
    return {"stopped": services.stop(found, user_of(request), save=body.save)}


def get_sweep(sweep_id: UUID) -> Sweep:
    """Raises Http404 with a sentence."""
    found = Sweep.objects.select_related("owner").filter(pk=sweep_id).first()
    if found is None:
        raise Http404(f"There is no sweep {sweep_id}.")
    return found


def _as_row(request: HttpRequest, results: Results) -> dict[str, Any]:
    sweep = results.sweep
    columns = ("id", "name", "method", "axes", "metric", "goal", "created_at")
    return {
        **{name: getattr(sweep, name) for name in columns}, "owner": sweep.owner.username, "base": sweep.base_id,
        "states": results.states, "url": request.build_absolute_uri(reverse("sweeps:detail", args=[sweep.pk])),
    }  # fmt: skip
