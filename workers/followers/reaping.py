"""Ends what dead supervisors of followers left behind, as workers/reaper.py does for attempts."""

from __future__ import annotations

from webapp.runs.models import ACTIVE, ENDED, Follower, State
from workers import failures, reaper
from workers.ending import Outcome
from workers.followers.ending import conclude, fail


def reap_host(host_name: str) -> list[Follower]:
    """Look after the followers of this host; returns those whose end it wrote.

    One without a supervisor gets it from `starting`; that none comes up is seen by the supervisor of its attempt.
    """
    of_host = Follower.objects.filter(host__name=host_name).select_related("attempt__run", "host")
    reaped = []
    for follower in of_host.filter(state__in=ACTIVE):
        if follower.supervisor_pid is None and follower.attempt.state in ENDED:
            outcome = Outcome(State.STOPPED, "The run ended before this host began.")
        elif follower.supervisor_pid is not None and not reaper.supervised(follower):
            outcome = _killed(follower)
        else:
            continue
        if fail(follower, outcome):
            reaped.append(follower)
        conclude(follower, outcome, reaper.end_processes(follower))
    for follower in of_host.filter(state__in=ENDED, leases__isnull=False).distinct():
        if not reaper.supervised(follower):
            conclude(follower, Outcome(State.STOPPED, follower.reason), reaper.end_processes(follower))
    return reaped


def _killed(follower: Follower) -> Outcome:
    reason = (
        f"The supervisor of host {follower.host.name}, which has a part of the trainer, was killed, so its processes were "
        "ended; resume to go on from the last checkpoint."
    )
    return Outcome(State.FAILED, reason, failures.last_lines(failures.tail(follower.log("trainer"))))
