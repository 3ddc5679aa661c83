"""Starts the supervisors of followers: of a run over several hosts, the part on this one."""

from __future__ import annotations

from webapp.runs.models import ACTIVE, Follower, State
from workers import processes
from workers.claiming import launch_supervisor

SUPERVISOR_MODULE = "workers.followers.supervisor"


def start_for(host_name: str) -> None:
    """Start a supervisor for each follower of this host that has none. One that is on its way is left to come up."""
    waiting = Follower.objects.filter(host__name=host_name, state=State.STARTING, supervisor_pid=None)
    for follower in waiting.filter(attempt__state__in=ACTIVE).select_related("attempt__run", "host"):
        if not processes.marked(str(follower.pk)):
            launch_supervisor(follower, SUPERVISOR_MODULE, "--follower", follower.log("supervisor"))
