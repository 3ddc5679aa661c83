"""Many runs report at once while many people look: how long do their pages take, and does anybody meet a locked database?"""

from __future__ import annotations

import math
import multiprocessing
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

METRICS = 70
STEP_S = 2.0
POLL_S = 1.5
PAGES = ("/runs/", "/runs/{run}/", "/api/runs/{run}/metrics")
"""What a person opens now and then, beside a chart that asks for what is new each `POLL_S`."""


@dataclass
class Load:
    """Milliseconds of each request by what was asked for, and everything that went wrong."""

    times: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    points: int = 0
    stored: int = 0

    def p99(self, what: str = "") -> float:
        """Over one kind of request, or over all."""
        found = sorted(ms for kind, times in self.times.items() if what in ("", kind) for ms in times)
        return found[min(math.ceil(0.99 * len(found)) - 1, len(found) - 1)]


def under_load(url: str, owner: Any, runs: int, clients: int, seconds: float) -> Load:
    """Django is set up in this process, and a web server on the same database answers at `url`."""
    import logging

    from django.db import connections
    from django.test import Client

    from webapp.metrics.models import Series
    from webapp.runs.models import Attempt, Run, State

    logging.getLogger("httpx").setLevel(logging.WARNING)
    attempts = []
    for index in range(runs):
        run = Run.objects.create(name=f"run {index}", owner=owner, spec={}, state=State.RUNNING)
        attempts.append(Attempt.objects.create(run=run, number=1, state=State.RUNNING))
    browser = Client()
    browser.force_login(owner)
    session = browser.cookies["sessionid"].value
    ids = [str(attempt.run_id) for attempt in attempts]
    with httpx.Client(base_url=url, cookies={"sessionid": session}, timeout=60) as client:
        for page in PAGES:  # templates are compiled once in a server's life
            client.get(page.format(run=ids[0])).raise_for_status()
    connections.close_all()
    context = multiprocessing.get_context("fork")
    complaints = context.SimpleQueue()
    until = time.monotonic() + seconds
    supervisors = [context.Process(target=report, args=(attempt, until, complaints)) for attempt in attempts]
    load = Load()
    people = [threading.Thread(target=watch, args=(url, session, ids, index, until, load)) for index in range(clients)]
    for each in (*supervisors, *people):
        each.start()
    for each in (*people, *supervisors):
        each.join(seconds + 120)
    while not complaints.empty():
        load.failures.append(complaints.get())
    load.failures += [f"a supervisor ended with {each.exitcode}" for each in supervisors if each.exitcode != 0]
    spools = [attempt.folder / "spool.jsonl" for attempt in attempts]
    load.points = sum(len(spool.read_bytes().splitlines()) * METRICS for spool in spools if spool.exists())
    load.stored = sum(Series.objects.filter(attempt__in=attempts).values_list("points", flat=True))
    return load


def report(attempt: Any, until: float, complaints: Any) -> None:
    """A trainer's spool and the supervisor's shipper of it, in one process."""
    from trainer_core.spool import Spool
    from workers.shipping import ship_all

    rng = random.Random(str(attempt.pk))
    spool = Spool(attempt.folder / "spool.jsonl")
    names = ["reward", "loss", *(f"group/metric_{index}" for index in range(METRICS - 2))]
    time.sleep(rng.uniform(0, STEP_S))
    step = 0
    while time.monotonic() < until:
        step += 1
        spool.metrics(step, {name: rng.gauss(0, 1) for name in names})
        try:
            ship_all(attempt)
        except Exception as error:  # noqa: BLE001  whatever it is, it is what this measures
            complaints.put(f"{type(error).__name__}: {error}")
        time.sleep(STEP_S)
    ship_all(attempt)
    spool.close()


def watch(url: str, session: str, ids: list[str], number: int, until: float, load: Load) -> None:
    """One browser: charts of a run kept up to date, another page now and then."""
    rng = random.Random(number)
    run = ids[number % len(ids)]
    metrics = [("metric", f"group/metric_{index}") for index in range(20)] + [("metric", "reward")]
    cursor = ""
    with httpx.Client(base_url=url, cookies={"sessionid": session}, timeout=60) as client:

        def get(kind: str, path: str, query: Any = None) -> httpx.Response | None:
            begin = time.perf_counter()
            try:
                answer = client.get(path, params=query)
            except httpx.HTTPError as error:
                load.failures.append(f"{path}: {error!r}")
                return None
            load.times.setdefault(kind, []).append(1000 * (time.perf_counter() - begin))
            if answer.status_code != 200:
                load.failures.append(f"{path}: {answer.status_code}")
                return None
            return answer

        time.sleep(rng.uniform(0, POLL_S))
        while time.monotonic() < until:
            query = [*metrics, *([("after", cursor)] if cursor else [])]
            answer = get("poll" if cursor else "charts", f"/api/runs/{run}/chart", query)
            body = answer.json() if answer else {"reset": True}
            cursor = "" if body.get("reset") else body["cursor"]
            if rng.random() < 0.2:
                page = rng.choice(PAGES)
                get(page, page.format(run=rng.choice(ids)))
            time.sleep(POLL_S)
