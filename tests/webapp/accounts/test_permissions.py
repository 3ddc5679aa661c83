"""Every page and every operation of the API is asked by everybody; who is let in must be who should be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import URLPattern, URLResolver, get_resolver, reverse
from django.utils import timezone

from tests.webapp import seed
from webapp.accounts import routes
from webapp.accounts.models import ApiToken, Role, User
from webapp.accounts.permissions import Action, Denied, can, require
from webapp.api.urls import api
from webapp.checkpoints.models import Checkpoint
from webapp.reports.models import Report
from webapp.rewards import services as rewards
from webapp.runs.models import Run, State
from webapp.secrets.services import store
from webapp.sharing.models import ShareLink
from webapp.sweeps.models import Sweep
from webapp.webhooks.models import Webhook

pytestmark = pytest.mark.django_db
PEOPLE = ("nobody", "viewer", "runner", "author", "owner", "admin")
ALL = set(PEOPLE)
SIGNED_IN = ALL - {"nobody"}
RUNNERS = {"runner", "owner", "admin"}
AUTHORS = {"author", "owner", "admin"}
OWNER = {"owner", "admin"}
ADMIN = {"admin"}

PAGES: dict[str, tuple[set[str], set[str]]] = {
    "login": (ALL, ALL), "logout": (ALL, ALL), "home": (SIGNED_IN, SIGNED_IN),
    "accounts:people": (ADMIN, ADMIN), "accounts:change_person": (ADMIN, ADMIN),
    "audit:list": (ADMIN, ADMIN), "audit:export": (ADMIN, ADMIN),
    "webhooks:list": (ADMIN, ADMIN), "webhooks:change": (ADMIN, ADMIN),
    "hosts:list": (SIGNED_IN, ADMIN), "hosts:drain": (SIGNED_IN, ADMIN),
    "runs:list": (SIGNED_IN, RUNNERS), "runs:detail": (SIGNED_IN, RUNNERS), "runs:logs": (SIGNED_IN, RUNNERS),
    "runs:new": (RUNNERS, RUNNERS), "runs:check": (SIGNED_IN, RUNNERS), "runs:edit": (OWNER, OWNER),
    **{f"runs:{deed}": (SIGNED_IN, OWNER) for deed in ("launch", "stop", "resume", "archive", "delete", "describe",
                                                      "delete_checkpoint")},
    "rewards:list": (SIGNED_IN, AUTHORS), "rewards:new": (AUTHORS, AUTHORS), "rewards:edit": (OWNER, OWNER),
    "rewards:validate": (SIGNED_IN, AUTHORS), "rewards:test": (SIGNED_IN, AUTHORS), "rewards:archive": (SIGNED_IN, OWNER),
    "sweeps:list": (SIGNED_IN, RUNNERS), "sweeps:new": (RUNNERS, RUNNERS), "sweeps:preview": (SIGNED_IN, RUNNERS),
    "sweeps:detail": (SIGNED_IN, RUNNERS), "sweeps:stop": (SIGNED_IN, OWNER),
    "secrets:list": (RUNNERS, RUNNERS), "secrets:delete": (SIGNED_IN, OWNER),
    "reports:list": (SIGNED_IN, RUNNERS), "reports:new": (RUNNERS, RUNNERS), "reports:edit": (OWNER, OWNER),
    "reports:detail": (SIGNED_IN, RUNNERS), "reports:delete": (SIGNED_IN, OWNER),
    "sharing:run": (SIGNED_IN, OWNER), "sharing:report": (SIGNED_IN, OWNER), "sharing:revoke": (SIGNED_IN, OWNER),
    **{f"shared:{name}": (ALL, ALL) for name in ("show", "chart", "metrics", "points")},
    "checkpoints:file": (SIGNED_IN, RUNNERS), "checkpoints:zip": (SIGNED_IN, RUNNERS),
    **{f"checkpoints:{deed}": (SIGNED_IN, OWNER) for deed in ("merge", "push", "delete_export")},
    "playground:page": (SIGNED_IN, RUNNERS), "playground:talk": (SIGNED_IN, OWNER),
    "playground:start": (SIGNED_IN, OWNER), "playground:stop": (SIGNED_IN, OWNER),
}  # fmt: skip
"""Who may read, and who may do more. A route that is not here must follow accounts/routes.py."""

API: dict[str, set[str]] = {
    "GET /api/health": ALL, "GET /api/me": SIGNED_IN, "GET /api/hosts": SIGNED_IN, "GET /api/audit": ADMIN,
    "GET /api/runs": SIGNED_IN, "GET /api/runs/{run_id}": SIGNED_IN, "GET /api/runs/{run_id}/chart": SIGNED_IN,
    "POST /api/runs": RUNNERS, "POST /api/imports": RUNNERS, "POST /api/runs/{run_id}/clone": RUNNERS,
    "POST /api/runs/{run_id}/sweep": RUNNERS,
    **{f"POST /api/runs/{{run_id}}/{deed}": OWNER for deed in ("launch", "stop", "resume", "archive")},
    "POST /api/runs/{run_id}/metrics": RUNNERS,  # whose run it is comes after the query, which is missing here
    "DELETE /api/runs/{run_id}": OWNER, "PATCH /api/runs/{run_id}": OWNER,
    "GET /api/sweeps": SIGNED_IN, "POST /api/sweeps/{sweep_id}/stop": OWNER,
    "GET /api/reports": SIGNED_IN, "POST /api/reports": RUNNERS, "DELETE /api/reports/{report_id}": OWNER,
    "GET /api/rewards": SIGNED_IN, "POST /api/rewards": AUTHORS, "POST /api/rewards/test": AUTHORS,
    "POST /api/rewards/{name}/versions": AUTHORS,  # the same
}  # fmt: skip


@pytest.fixture
def people() -> dict[str, User | None]:
    made: dict[str, User | None] = {"nobody": None}
    for name, role in (("viewer", Role.VIEWER), ("runner", Role.RUNNER), ("author", Role.AUTHOR),
                       ("owner", Role.RUNNER_AND_AUTHOR), ("admin", Role.ADMIN)):  # fmt: skip
        user = User(username=name)
        user.role = role
        user.save()
        made[name] = user
    return made


@pytest.fixture
def things(people: dict[str, User | None]) -> dict[str, Any]:
    """Arguments of every route, by name; what can be owned is the owner's."""
    owner = people["owner"]
    assert owner is not None
    run = seed.make_run(owner, state=State.DRAFT)
    attempt = run.attempts.create(number=1)
    checkpoint = Checkpoint.objects.create(run=run, attempt=attempt, step=1, kind="adapter", created_at=timezone.now())
    source = "def short(completions, **columns):\n    return [0.0 for c in completions]\n"
    rewards.create_function(source, "", owner)
    hook = Webhook.objects.create(name="hook", url="https://example.org/")
    token, _ = ApiToken.create(owner, "token")
    sweep = Sweep.objects.create(name="sweep", owner=owner, method="grid", axes={})
    report = Report.objects.create(title="report", owner=owner, text="text")
    link, shared = ShareLink.create(run, owner, timedelta(days=1))
    export = checkpoint.exports.create(kind="merge", owner=owner)
    rollout = run.rollouts.create(
        attempt=attempt, step=1, group_id="g", row_index=0, created_at=timezone.now(), data={"rewards": {}}
    )
    return {
        "run_id": run.pk, "checkpoint_id": checkpoint.pk, "name": "short", "number": 1, "host_id": seed.make_host().pk,
        "hook_id": hook.pk, "token_id": token.pk, "user_id": owner.pk, "part": "model", "attempt": 1,
        "export_id": export.pk, "rollout_id": rollout.pk,
        "sweep_id": sweep.pk, "report_id": report.pk, "link_id": link.pk, "token": shared,
        "secret_id": store(owner, "HF_TOKEN", "not a real one").pk,
    }  # fmt: skip


def patterns(
    node: URLResolver, prefix: str = "", outer: dict[str, Any] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of every page below a resolver, and its arguments with something that looks like each."""
    likely = {"IntConverter": 1, "UUIDConverter": uuid4(), "StringConverter": "x"}
    for item in node.url_patterns:
        arguments = {**(outer or {}), **dict.fromkeys(item.pattern.regex.groupindex, "1")}
        arguments |= {name: likely.get(type(kind).__name__, "1") for name, kind in item.pattern.converters.items()}
        if isinstance(item, URLPattern):
            yield f"{prefix}{item.name}", arguments
        else:
            yield from patterns(item, f"{prefix}{item.namespace}:" if item.namespace else prefix, arguments)


def pages() -> dict[str, dict[str, Any]]:
    return {name: arguments for name, arguments in patterns(get_resolver()) if not name.startswith("api:")}


def operations() -> list[tuple[str, str]]:
    paths = api.get_openapi_schema()["paths"]
    return [(method.upper(), path) for path, item in paths.items() for method in item if method in
            ("get", "post", "put", "patch", "delete", "head")]  # fmt: skip


def let_in(people: dict[str, User | None], ask: Callable[[Client], HttpResponse]) -> set[str]:
    """Who is not turned away; what is done is undone again."""
    inside = set()
    for name, user in people.items():
        client = Client()
        if user is not None:
            client.force_login(user)
        with transaction.atomic():
            answer = ask(client)
            transaction.set_rollback(True)
        to_login = answer.status_code == 302 and answer.headers["Location"].startswith("/login/?next=")
        if answer.status_code not in (401, 403) and not to_login:
            inside.add(name)
        assert answer.status_code < 500, answer.content
        if answer.status_code == 403:
            assert "Nobody has decided" not in answer.content.decode()
    return inside


def by_rule(people: dict[str, User | None], rule: routes.Rule | None, method: str) -> set[str]:
    assert rule is not None
    action = rule.read if method in routes.SAFE else rule.write
    return {name for name, user in people.items() if action is Action.ANYONE or (user and can(user, action))}


@pytest.mark.slow
def test_every_page_lets_in_who_may_and_nobody_else(people: dict[str, User | None], things: dict[str, Any]) -> None:
    known = pages()
    assert not set(PAGES) - set(known)
    wrong = []
    for name, arguments in known.items():
        assert routes.page_rule(name) is not None, f"nobody has decided who may use {name}: see accounts/routes.py"
        path = reverse(name, kwargs={argument: things.get(argument, like) for argument, like in arguments.items()})
        for index, method in enumerate(("GET", "POST")):
            expected = PAGES[name][index] if name in PAGES else by_rule(people, routes.page_rule(name), method)
            found = let_in(people, lambda client, m=method, p=path: client.generic(m, p))  # type: ignore[misc]
            # The owner alone may be let in further than the rule of the route says.
            fits = found == expected or (name not in PAGES and OWNER <= found <= expected)
            if not fits and not _not_allowed(people, method, path):
                wrong.append(f"{method} {name}: {sorted(found)} instead of {sorted(expected)}")
    assert wrong == []


def _not_allowed(people: dict[str, User | None], method: str, path: str) -> bool:
    """Whether the page does not take this method at all."""
    client = Client()
    assert people["admin"] is not None
    client.force_login(people["admin"])
    with transaction.atomic():
        status = client.generic(method, path).status_code
        transaction.set_rollback(True)
    return status == 405


@pytest.mark.slow
def test_every_operation_of_the_api_lets_in_who_may(people: dict[str, User | None], things: dict[str, Any]) -> None:
    known = [f"{method} {path}" for method, path in operations()]
    assert not set(API) - set(known)
    wrong = []
    for method, path in operations():
        rule = routes.api_rule(path.lstrip("/"))
        assert rule is not None, f"nobody has decided who may use {path}: see accounts/routes.py"
        filled = path
        for argument, value in things.items():
            filled = filled.replace(f"{{{argument}}}", str(value))
        filled = re.sub(r"\{\w+\}", "1", filled)
        expected = API.get(f"{method} {path}", by_rule(people, rule, method))
        found = let_in(people, lambda client, m=method, p=filled: client.generic(  # type: ignore[misc]
            m, p, data=b"{}", content_type="application/json"))  # fmt: skip
        if found != expected and not (f"{method} {path}" not in API and OWNER <= found <= expected):
            wrong.append(f"{method} {path}: {sorted(found)} instead of {sorted(expected)}")
    assert wrong == []


def test_a_route_without_a_decision_is_refused(people: dict[str, User | None]) -> None:
    request = RequestFactory().get("/new/")
    request.user = people["admin"]  # type: ignore[assignment]
    for rule in (routes.page_rule("nothing:new"), routes.page_rule("new"), routes.api_rule("api/new/thing")):
        with pytest.raises(Denied, match=r"routes\.py must name it"):
            routes.demand(request, rule)


def test_a_refusal_says_who_may(people: dict[str, User | None], things: dict[str, Any]) -> None:
    run = Run.objects.get()
    for name, action, thing, sentence in (
        (
            "viewer",
            Action.RUN,
            None,
            r"Your account \(viewer\) may not make or steer runs; an admin can make it a runner",
        ),
        ("runner", Action.RUN, run, "The run belongs to owner; only its owner or an admin may change it"),
        ("runner", Action.REWARD, None, r"\(runner\) may not write or try reward functions"),
        ("author", Action.ADMIN, None, "it is for admins"),
    ):
        user = people[name]
        assert user is not None
        with pytest.raises(Denied, match=sentence):
            require(user, action, thing)
    page = signed_in(people["viewer"]).post(f"/runs/{run.pk}/launch/")
    assert (page.status_code, "an admin can make it a runner" in page.content.decode()) == (403, True)
    answer = signed_in(people["runner"]).post(f"/api/runs/{run.pk}/launch")
    assert (answer.status_code, answer.json()["detail"]) == (403, "The run belongs to owner; only its owner or an admin may "
                                                             "change it.")  # fmt: skip


def signed_in(user: User | None) -> Client:
    assert user is not None
    client = Client()
    client.force_login(user)
    return client


def test_an_owner_who_is_a_viewer_now_can_no_longer_steer(
    people: dict[str, User | None], things: dict[str, Any]
) -> None:
    owner, run = people["owner"], Run.objects.get()
    assert owner is not None
    assert can(owner, Action.RUN, run)
    signed_in(people["admin"]).post(f"/account/people/{owner.pk}/", {"action": "role", "role": "viewer"})
    assert signed_in(User.objects.get(pk=owner.pk)).post(f"/runs/{run.pk}/launch/").status_code == 403


def test_what_may_not_be_done_is_not_offered(people: dict[str, User | None], things: dict[str, Any]) -> None:
    run = Run.objects.get()
    paths = ("/runs/", f"/runs/{run.pk}/", f"/runs/{run.pk}/checkpoints/", "/rewards/", "/rewards/short/", "/hosts/")
    offers = {"new-run", "launch", "clone", "delete", "new-reward", "edit-reward", "test-panel", "drain"}

    def offered(name: str) -> set[str]:
        text = "".join(signed_in(people[name]).get(path).content.decode() for path in paths)
        return {offer for offer in offers if f'data-testid="{offer}"' in text}

    assert offered("viewer") == set()
    assert offered("runner") == {"new-run", "clone"}
    assert offered("author") == {"new-reward", "test-panel"}
    assert offered("owner") == offers - {"drain"}
    assert offered("admin") == offers


def test_a_token_that_may_only_read_changes_nothing(people: dict[str, User | None], things: dict[str, Any]) -> None:
    owner, run = people["owner"], Run.objects.get()
    assert owner is not None
    _, text = ApiToken.create(owner, "reader", reads_only=True)
    client = Client(headers={"Authorization": f"Bearer {text}"})
    assert client.get(f"/api/runs/{run.pk}").status_code == 200
    for answer in (client.post(f"/api/runs/{run.pk}/launch"), client.delete(f"/api/runs/{run.pk}"),
                   client.post("/api/rewards/test", {}, content_type="application/json")):  # fmt: skip
        assert (answer.status_code, answer.json()["detail"][:30]) == (403, "This API token may only read; "[:30])


def test_a_role_that_does_not_exist_is_refused_with_those_that_do(people: dict[str, User | None]) -> None:
    runner = people["runner"]
    assert runner is not None
    path = f"/account/people/{runner.pk}/"
    page = signed_in(people["admin"]).post(path, {"action": "role", "role": "king"}, follow=True).content.decode()
    assert "no role &#x27;king&#x27;; there are viewer, runner, author, runner+author, admin" in page
    assert User.objects.get(pk=runner.pk).role == Role.RUNNER


@pytest.mark.django_db(transaction=True)
def test_accounts_of_before_keep_what_they_could_do() -> None:
    executor = MigrationExecutor(connection)
    newest = executor.loader.graph.leaf_nodes()
    executor.migrate([("accounts", "0002_failedsignin"), ("audit", None)])
    old = executor.loader.project_state([("accounts", "0002_failedsignin")]).apps.get_model("accounts", "User")
    old.objects.create(username="chief", is_superuser=True)
    old.objects.create(username="member")
    try:
        MigrationExecutor(connection).migrate(newest)
        assert {user.username: user.role for user in User.objects.all()} == {
            "chief": Role.ADMIN, "member": Role.RUNNER_AND_AUTHOR,
        }  # fmt: skip
    finally:
        MigrationExecutor(connection).migrate(newest)
        User.objects.all().delete()
