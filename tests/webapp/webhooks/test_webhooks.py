"""Webhooks: told once and in order, tried again, and never used to reach what is inside the network."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from tests.webapp import seed
from webapp.accounts.models import User
from webapp.runs.lifecycle import change_state, record
from webapp.runs.models import Run, State
from webapp.webhooks import address, sending
from webapp.webhooks.models import Webhook

pytestmark = pytest.mark.django_db


class Listener:
    """A real HTTP server that remembers what it was told."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.got.append((dict(self.headers), body))
                self.send_response(listener.status)
                self.send_header("Location", "http://169.254.169.254/")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?key=1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setenv(address.ALLOWED_HOSTS, "chat.local,127.0.0.1")
    made = Listener()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def hook(listener: Listener) -> Webhook:
    return Webhook.objects.create(name="chat", url=listener.url)


@pytest.fixture
def run(ada: User) -> Run:
    return seed.make_run(ada, steps=0)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost:8000/", "http://169.254.169.254/latest/meta-data", "http://10.1.2.3/", "http://[::1]/",
        "http://192.168.0.1/", "http://0.0.0.0/", "http://2130706433/", "http://0x7f.1/", "http://[::ffff:127.0.0.1]/",
        "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://100.64.0.1/", "http://[fd00::1]/", "http://224.0.0.1/",
    ],
)  # fmt: skip
def test_an_address_inside_the_network_is_refused_however_it_is_written(url: str) -> None:
    with pytest.raises(address.Forbidden):
        address.check(url)


@pytest.mark.parametrize(
    "url", ["ftp://example.org/", "file:///etc/passwd", "https://", "nonsense", "http://a:b@example.org/"]
)
def test_what_is_no_plain_web_address_is_refused(url: str) -> None:
    with pytest.raises(address.Forbidden):
        address.check(url)


def test_a_name_that_points_inside_is_refused_and_the_checked_address_is_the_one_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter(["93.184.216.34", "127.0.0.1"])

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    target = address.check("https://example.org/x?y=1")
    assert target == address.Target("https://93.184.216.34:443/x?y=1", "example.org", "example.org")
    with pytest.raises(address.Forbidden, match=r"example\.org is 127\.0\.0\.1, an address inside this network"):
        address.check("https://example.org/")


def test_an_end_and_an_alert_are_told_once_in_order_and_signed(listener: Listener, hook: Webhook, run: Run) -> None:
    record(run, "alert:stalled", "Stalled: nothing new.", level="warning", step=3)
    record(run, "checkpoint", "Not told.")
    change_state(run, (State.RUNNING,), State.FAILED, "The GPU ran out of memory.")
    sending.send_due()
    sending.send_due()
    told = [json.loads(body) for _, body in listener.got]
    assert [body["event"] for body in told] == ["alert:stalled", "state:failed"]
    assert told[1]["text"] == "products, LoRA r=16: The GPU ran out of memory."
    assert told[0]["step"] == 3
    for headers, body in listener.got:
        expected = hmac.new(hook.secret.encode(), body, hashlib.sha256).hexdigest()
        assert headers["X-Offbeat-Signature"] == f"sha256={expected}"


def test_what_did_not_arrive_is_tried_again_later_and_nothing_is_skipped(
    listener: Listener, hook: Webhook, run: Run
) -> None:
    listener.status = 302  # a redirect is not followed: it counts as not arrived
    record(run, "alert:one", "One.")
    record(run, "alert:two", "Two.")
    sending.send_due()
    assert len(listener.got) == 1
    hook.refresh_from_db()
    assert (hook.failures, hook.last_error) == (1, "It answered 302.")
    sending.send_due()  # too early
    assert len(listener.got) == 1
    listener.status = 200
    Webhook.objects.update(next_try_at=timezone.now() - timedelta(seconds=1))
    sending.send_due()
    assert [json.loads(body)["event"] for _, body in listener.got] == ["alert:one", "alert:one", "alert:two"]
    hook.refresh_from_db()
    assert (hook.failures, hook.last_error, hook.active) == (0, "", True)


def test_one_that_never_answers_is_switched_off(run: Run, listener: Listener) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hook = Webhook.objects.create(name="gone", url=f"http://127.0.0.1:{port}/", failures=sending.GIVE_UP_AFTER - 1)
    record(run, "alert:one", "One.")
    sending.send_due()
    hook.refresh_from_db()
    assert (hook.active, hook.failures) == (False, sending.GIVE_UP_AFTER)
    assert hook.last_error.startswith("It did not answer")


def test_admins_add_try_and_delete_them_and_nobody_else_does(
    as_admin: Client, as_ada: Client, listener: Listener, run: Run
) -> None:
    assert as_ada.get("/webhooks/").status_code == 403
    refused = as_admin.post("/webhooks/", {"name": "x", "url": "http://169.254.169.254/"})
    assert refused.status_code == 400
    assert "an address inside this network" in refused.content.decode()
    record(run, "alert:old", "Before.")
    as_admin.post("/webhooks/", {"name": "chat", "url": listener.url})
    hook = Webhook.objects.get()
    sending.send_due()
    assert listener.got == []  # what happened before is not told
    assert as_ada.post(f"/webhooks/{hook.pk}/", {"action": "delete"}).status_code == 403
    said = as_admin.post(f"/webhooks/{hook.pk}/", {"action": "test"}, follow=True).content.decode()
    assert "has taken the test message" in said
    assert json.loads(listener.got[0][1])["event"] == "test"
    as_admin.post(f"/webhooks/{hook.pk}/", {"action": "delete"})
    assert not Webhook.objects.exists()
