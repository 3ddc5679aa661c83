"""Talking to the model of a live run: only through the run's own server, only for who may, and with a sentence if not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.test import Client

from tests.webapp import seed
from tests.webapp.playground.stand_in_server import Server, serving
from webapp.accounts.models import User
from webapp.playground import server as playground
from webapp.runs.models import Run

if TYPE_CHECKING:
    from tests.vllm_server import RunningServer

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous"),
]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server(["run-v3", "run-v12"])) as found:
        yield found


def has_server(run: Run, port: int, number: int = 0, state: str = "ready") -> None:
    attempt = run.current_attempt
    assert attempt is not None
    attempt.servers.create(number=number, port=port, state=state)


@pytest.fixture
def run(ada: User, server: Server) -> Run:
    run = seed.make_run(ada, steps=20)
    has_server(run, server.port)
    return run


def say(client: Client, run: Run, text: str = "hello there", **changes: Any) -> tuple[int, list[dict[str, Any]]]:
    body = {"model": "run-v12", "messages": [{"role": "user", "content": text}], **changes}
    answer = client.post(f"/runs/{run.pk}/playground/talk/", json.dumps(body), content_type="application/json")
    content = b"".join(answer) if answer.streaming else answer.content  # type: ignore[arg-type]
    return answer.status_code, [json.loads(line) for line in content.splitlines()]


def test_an_answer_comes_in_pieces(as_ada: Client, run: Run, server: Server) -> None:
    status, lines = say(as_ada, run, temperature=0.3, max_tokens=7)
    assert status == 200
    assert "".join(line.get("text", "") for line in lines) == "run-v12 heard: hello there"
    assert len(lines) > 3
    assert lines[-1] == {"done": "stop", "tokens": 4}
    (asked,) = server.asked
    assert (asked["temperature"], asked["max_tokens"], asked["stream"]) == (0.3, 7, True)


def test_the_page_offers_weights_checkpoints_and_the_base(as_ada: Client, run: Run) -> None:
    page = as_ada.get(f"/runs/{run.pk}/playground/").content.decode()
    side = page.split('data-side="a"')[1].split("</select>")[0]
    titles = [part.split("<")[0] for part in side.split(">") if part.startswith(("Weights", "Checkpoint", "Base"))]
    assert titles == ["Weights of step 12 (newest)", "Weights of step 3", "Checkpoint of step 20", "Base model"]
    assert "Solve the following multiplication" in page


def test_a_checkpoint_is_loaded_into_the_server_once(as_ada: Client, run: Run, server: Server) -> None:
    checkpoint = run.checkpoints.get()
    for _ in range(2):
        status, lines = say(as_ada, run, model=f"checkpoint-{checkpoint.pk}")
        assert (status, lines[-1]["done"]) == (200, "stop")
    assert server.loaded == [(f"playground-{checkpoint.pk}", str(checkpoint.folder.resolve()))]
    assert {asked["model"] for asked in server.asked} == {f"playground-{checkpoint.pk}"}


def test_a_server_of_whole_weights_has_the_current_ones(as_ada: Client, ada: User) -> None:
    with serving(Server([])) as server:
        run = seed.make_run(ada, steps=20)
        has_server(run, server.port)
        page = as_ada.get(f"/runs/{run.pk}/playground/").content.decode()
        assert "Current weights" in page
        assert "Base model" not in page
        assert say(as_ada, run, model="current")[1][0] == {"text": "policy"}


def test_no_request_names_an_address_or_a_folder(as_ada: Client, run: Run, server: Server) -> None:
    for model in ("http://169.254.169.254/", "/etc", "checkpoint-999", "policy", "../run-v3"):
        status, lines = say(as_ada, run, model=model)
        assert (status, "does not have this model" in lines[0]["failed"]) == (409, True)
    for key in ("url", "lora_path", "host"):
        status, lines = say(as_ada, run, **{key: "http://127.0.0.1:1/"})
        assert (status, lines[0]["failed"].startswith(key)) == (422, True)
    assert (server.asked, server.loaded) == ([], [])


@pytest.mark.parametrize("changes, words", [
    ({"messages": []}, "messages"), ({"max_tokens": 5000}, "max_tokens"), ({"temperature": -1}, "temperature"),
    ({"messages": [{"role": "tool", "content": ""}]}, "role"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 400_001}]}, "too long"),
])  # fmt: skip
def test_what_can_not_be_asked_is_said(as_ada: Client, run: Run, changes: dict[str, Any], words: str) -> None:
    status, lines = say(as_ada, run, **changes)
    assert (status, words in lines[0]["failed"]) == (422, True)


def test_what_the_server_refuses_is_passed_on(as_ada: Client, run: Run, server: Server) -> None:
    server.refusal = (400, {"error": {"message": "The prompt is longer\nthan the context."}})
    assert say(as_ada, run)[1] == [{"failed": "The server refused (HTTP 400): The prompt is longer than the context."}]
    server.refusal = (500, {})
    assert say(as_ada, run)[1] == [{"failed": "The server refused (HTTP 500)."}]


def test_a_slow_server_is_given_up(as_ada: Client, run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "DEADLINE_S", 0.3)
    server.delay_s = 2.0
    assert "did not answer within" in say(as_ada, run)[1][-1]["failed"]


@pytest.mark.parametrize("state, words", [
    ("completed", "The run is completed, so it has no server"), ("queued", "waits for its turn"), ("draft", "is draft"),
    ("starting", "No server of the run is ready yet"),
])  # fmt: skip
def test_without_a_server_a_sentence_says_why(as_ada: Client, ada: User, state: str, words: str) -> None:
    run = seed.make_run(ada, state=state, steps=0)
    assert words in as_ada.get(f"/runs/{run.pk}/playground/").content.decode()
    status, lines = say(as_ada, run)
    assert (status, words in lines[0]["failed"]) == (409, True)


def test_a_server_that_does_not_listen_here_is_said(as_ada: Client, ada: User) -> None:
    run = seed.make_run(ada, steps=1)
    has_server(run, 1)
    assert "runs on another host (workbench)" in as_ada.get(f"/runs/{run.pk}/playground/").content.decode()


def test_of_several_servers_the_first_that_is_ready_answers_and_the_page_says_which(
    as_ada: Client, ada: User, server: Server
) -> None:
    run = seed.make_run(ada, steps=1)
    has_server(run, 1, state="starting")
    has_server(run, server.port, number=1)
    page = as_ada.get(f"/runs/{run.pk}/playground/").content.decode()
    assert "Answers come from server 1 of the run&#x27;s 2, the first that is ready." in page
    assert say(as_ada, run)[0] == 200


def test_only_who_may_steer_the_run_talks(as_grace: Client, as_ada: Client, run: Run, server: Server) -> None:
    assert "Only for who may steer the run" in as_grace.get(f"/runs/{run.pk}/playground/").content.decode()
    path = f"/runs/{run.pk}/playground/talk/"
    assert as_grace.post(path, "{}", content_type="application/json").status_code == 403
    assert Client().post(path, "{}", content_type="application/json").status_code == 302
    assert as_ada.get(path).status_code == 405
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(run.owner)
    assert strict.post(path, "{}", content_type="application/json").status_code == 403
    assert server.asked == []


@pytest.mark.server
def test_a_real_server_answers(as_ada: Client, ada: User, tiny_server: RunningServer) -> None:
    run = seed.make_run(ada, steps=1)
    has_server(run, tiny_server.port)
    status, lines = say(as_ada, run, "w5 w6", model="current", max_tokens=5)
    assert status == 200
    assert lines[-1] == {"done": "length", "tokens": 5}
    assert "".join(line.get("text", "") for line in lines[:-1])
