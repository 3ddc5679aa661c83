"""Starting a server for the playground of a run that has none: what the page offers, asks for and says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from tests.webapp.playground.stand_in_server import Server, serving
from webapp.accounts.models import User
from webapp.checkpoints.models import Checkpoint
from webapp.hosts.models import Device, Host
from webapp.playground import services
from webapp.playground.models import PlaygroundServer
from webapp.playground.serving import talking_spec
from webapp.runs import services as runs
from webapp.runs.commands import serve_command
from webapp.runs.lifecycle import Refused
from webapp.runs.models import Run

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous"),
]
HERE = "workbench"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_HOST", HERE)


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, state="completed", steps=40)


def page_of(client: Client, run: Run) -> str:
    return client.get(f"/runs/{run.pk}/playground/").content.decode()


def status_of(client: Client, run: Run, chatting: str = "") -> Any:
    return client.get(f"/runs/{run.pk}/playground/server/?seen=&chatting={chatting}")


def press(client: Client, run: Run, deed: str, **fields: str) -> str:
    return client.post(f"/runs/{run.pk}/playground/server/{deed}/", fields, follow=True).content.decode()


def answering(server: PlaygroundServer, port: int) -> None:
    """As its supervisor does once it is ready."""
    services.change(server, (server.state,), "running", "Ready.")
    server.ports.create(host=server.host, port=port, purpose="vLLM server")


def test_the_page_says_what_a_server_takes_and_starts_one(as_ada: Client, run: Run) -> None:
    page = page_of(as_ada, run)
    assert "The run is completed, so it has no server" in page
    assert f"A server takes the CPU slot of {HERE}, which is free" in page
    page = press(as_ada, run, "start")
    server = run.playground_servers.get()
    assert (server.state, server.host.name, server.owner, server.checkpoint) == ("queued", HERE, run.owner, None)
    assert f"Waits for the worker of {HERE}." in page
    assert "Leave the queue" in page
    assert "has a server already" in press(as_ada, run, "start")
    assert run.events.filter(name="playground_asked").count() == 1


def test_who_holds_the_device_is_said(as_ada: Client, ada: User, run: Run) -> None:
    seed.make_run(ada, "holder", steps=0, lease=True)
    assert "waits until that is free: now it is held by run holder." in page_of(as_ada, run)


@pytest.mark.parametrize("case, words", [
    ("silent", "no worker reports from it"), ("elsewhere", "no worker reports from it"), ("drained", "takes nothing new"),
    ("few", f"takes 1 GPU, but {HERE} has 0"), ("spec", "settings are not valid any more: training.max_steps"),
])  # fmt: skip
def test_what_stands_in_the_way_is_said_instead_of_a_button(
    as_ada: Client, run: Run, monkeypatch: pytest.MonkeyPatch, case: str, words: str
) -> None:
    if case == "silent":
        Host.objects.update(last_seen_at=timezone.now() - timedelta(minutes=5))
    elif case == "elsewhere":
        monkeypatch.setenv("OFFBEAT_HOST", "another")
    elif case == "drained":
        Host.objects.update(drained=True)
    elif case == "few":
        Device.objects.update(present=False)
    else:
        Run.objects.update(spec={**run.spec, "training": {"max_steps": -1}})
    page = page_of(as_ada, run)
    assert words in page
    assert "start-server" not in page
    assert words in press(as_ada, run, "start")
    assert not PlaygroundServer.objects.exists()


def test_whole_weights_are_one_checkpoint_at_a_time(as_ada: Client, run: Run) -> None:
    run.checkpoints.filter(step=40).update(kind="full")
    whole, adapter = run.checkpoints.get(step=40), run.checkpoints.get(step=20)
    assert f'<option value="{whole.pk}">Checkpoint of step 40</option>' in page_of(as_ada, run)
    for wrong in (str(adapter.pk), "999999", "x", "../../etc"):
        said = press(as_ada, run, "start", checkpoint=wrong)
        assert "adapters are chosen in the conversation" in said or "There is no such checkpoint" in said
    run.checkpoints.filter(step=40).update(deleted_at=timezone.now())
    assert "The checkpoint of step 40 is deleted" in press(as_ada, run, "start", checkpoint=str(whole.pk))
    run.checkpoints.filter(step=40).update(deleted_at=None)
    press(as_ada, run, "start", checkpoint=str(whole.pk))
    server = run.playground_servers.get()
    assert server.checkpoint == whole
    with serving(Server([])) as real:
        answering(server, real.port)
        assert "Checkpoint of step 40</option>" in page_of(as_ada, run).split('data-side="a"')[1]


def test_the_command_takes_adapters_whatever_the_run_did(run: Run) -> None:
    spec = run.run_spec()
    assert "--enable-lora" not in serve_command(spec, model_path="m", port=1, device="cpu").argv
    argv = serve_command(talking_spec(spec, adapters=True), model_path="m", port=1, device="cpu").argv
    assert argv[argv.index("--max-loras") + 1] == "2", "one for each side"
    assert argv[argv.index("--max-lora-rank") + 1] == "16"
    assert (
        "--enable-lora"
        not in serve_command(talking_spec(spec, adapters=False), model_path="m", port=1, device="cuda").argv
    )


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server([])) as found:
        yield found


def test_two_checkpoints_answer_and_the_server_counts_as_used(as_ada: Client, run: Run, server: Server) -> None:
    own = services.start(run, run.owner)
    waiting = status_of(as_ada, run)
    assert own.reason in waiting.content.decode()
    answering(own, server.port)
    assert status_of(as_ada, run).headers["HX-Refresh"] == "true"
    page = page_of(as_ada, run)
    side = page.split('data-side="a"')[1].split("</select>")[0]
    titles = [part.split("<")[0] for part in side.split(">") if part.startswith(("Weights", "Checkpoint", "Base"))]
    assert titles == ["Checkpoint of step 40", "Checkpoint of step 20", "Base model"]
    assert "It ends 10 min after the last message" in page
    long_ago = timezone.now() - timedelta(minutes=9)
    for checkpoint in run.checkpoints.all():
        PlaygroundServer.objects.update(last_used_at=long_ago)
        body = {"model": f"checkpoint-{checkpoint.pk}", "messages": [{"role": "user", "content": "hi"}]}
        answer = as_ada.post(f"/runs/{run.pk}/playground/talk/", json.dumps(body), content_type="application/json")
        lines = [json.loads(line) for line in b"".join(answer).splitlines()]  # type: ignore[arg-type]
        assert "".join(line.get("text", "") for line in lines) == f"playground-{checkpoint.pk} heard: hi"
        own.refresh_from_db()
        assert own.last_used_at > long_ago + timedelta(minutes=8)
    assert len(server.loaded) == 2


def test_an_open_page_does_not_keep_a_server_but_a_wait_counts(as_ada: Client, run: Run, server: Server) -> None:
    own = services.start(run, run.owner)
    long_ago = timezone.now() - timedelta(minutes=9)
    PlaygroundServer.objects.update(last_used_at=long_ago)
    status_of(as_ada, run)
    own.refresh_from_db()
    assert own.last_used_at > long_ago + timedelta(minutes=8)
    answering(own, server.port)
    PlaygroundServer.objects.update(last_used_at=long_ago)
    assert "Stop the server" in status_of(as_ada, run, "own").content.decode()
    own.refresh_from_db()
    assert own.last_used_at == long_ago


def test_a_refused_adapter_is_said(as_ada: Client, run: Run, server: Server) -> None:
    answering(services.start(run, run.owner), server.port)
    server.refuses_adapters = "LoRA rank 64 is greater than max_lora_rank 16"
    body = {"model": f"checkpoint-{run.checkpoints.first().pk}", "messages": [{"role": "user", "content": "hi"}]}
    answer = as_ada.post(f"/runs/{run.pk}/playground/talk/", json.dumps(body), content_type="application/json")
    (line,) = [json.loads(line) for line in b"".join(answer).splitlines()]  # type: ignore[arg-type]
    assert line == {"failed": "The server refused (HTTP 400): LoRA rank 64 is greater than max_lora_rank 16."}


def test_stopping_waits_for_its_supervisor_and_leaving_the_queue_does_not(
    as_ada: Client, run: Run, server: Server
) -> None:
    services.start(run, run.owner)
    press(as_ada, run, "stop")
    assert run.playground_servers.get().state == "stopped"
    own = services.start(run, run.owner)
    answering(own, server.port)
    assert "Stops…" in press(as_ada, run, "stop")
    own.refresh_from_db()
    assert (own.state, own.stop) == ("running", "Stopped by ada.")
    services.change(own, ("running",), "failed", "The vLLM server died: killed.", log=["line one", "<b>two</b>"])
    page = page_of(as_ada, run)
    assert "The vLLM server died: killed." in page
    assert "&lt;b&gt;two&lt;/b&gt;" in page
    assert "start-server" in page
    assert "has ended already" in press(as_ada, run, "stop")


def test_a_live_run_keeps_its_own_server_beside_it(as_ada: Client, ada: User, server: Server) -> None:
    run = seed.make_run(ada, steps=20)
    attempt = run.current_attempt
    assert attempt is not None
    with serving(Server(["run-v3"])) as runs_own:
        attempt.servers.create(number=0, port=runs_own.port, state="ready")
        own = services.start(run, ada)
        assert "Weights of step 3 (newest)" in page_of(as_ada, run), "while the other one comes up"
        answering(own, server.port)
        assert "Talk to it" in status_of(as_ada, run, "run").content.decode()
        assert "Weights of step 3" not in page_of(as_ada, run)


def test_a_server_that_hangs_is_said_and_the_page_does_not_reload_for_ever(as_ada: Client, run: Run) -> None:
    answering(services.start(run, run.owner), 1)
    page = page_of(as_ada, run)
    assert "The server does not listen on this machine" in page
    assert "chatting=lost" in page
    assert "HX-Refresh" not in status_of(as_ada, run, "lost").headers


def test_only_who_may_steer_the_run_starts_and_stops(as_grace: Client, run: Run) -> None:
    assert "The run's owner, ada, and admins may start" in page_of(as_grace, run)
    for deed in ("start", "stop"):
        path = f"/runs/{run.pk}/playground/server/{deed}/"
        assert as_grace.post(path).status_code == 403
        assert Client().post(path).status_code == 302
    assert not PlaygroundServer.objects.exists()


def test_a_run_is_not_deleted_while_its_playground_has_a_server(as_ada: Client, run: Run) -> None:
    own = services.start(run, run.owner)
    with pytest.raises(Refused, match="playground has a server"):
        runs.delete_run(run, run.owner)
    services.change(own, ("queued",), "stopped", "Stopped.")
    own.leases.create(device=Device.objects.get(), purpose="server")
    with pytest.raises(Refused, match="playground has a server"):
        runs.delete_run(run, run.owner)
    page = as_ada.get("/hosts/").content.decode()
    assert f'the <a href="/runs/{run.pk}/playground/">playground</a> of' in page
    assert as_ada.get("/api/hosts").json()[0]["devices"][0]["run"] == str(run.pk)
    own.leases.all().delete()
    runs.delete_run(run, run.owner)
    assert not PlaygroundServer.objects.exists()
    assert not Checkpoint.objects.exists()


def test_a_device_has_one_holder(run: Run) -> None:
    from django.db import IntegrityError, transaction

    from webapp.hosts.models import Lease

    device = Device.objects.get()
    own = services.start(run, run.owner)
    for holders in ({}, {"attempt": run.current_attempt, "playground": own}):
        with pytest.raises(IntegrityError), transaction.atomic():
            Lease.objects.create(device=device, purpose="server", **holders)
