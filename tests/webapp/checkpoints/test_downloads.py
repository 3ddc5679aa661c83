"""Downloads: ranges, conditions, containment, zips; and memory that does not grow with the file."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from django.test import Client
from django.utils import timezone

from webapp.accounts.models import ApiToken, User
from webapp.checkpoints import files
from webapp.checkpoints.models import Checkpoint
from webapp.runs.models import Attempt, Run

pytestmark = pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators")
WEIGHTS = bytes(range(256)) * 5000


@pytest.fixture
def checkpoint(ada: User, folders: Path) -> Checkpoint:
    run = Run.objects.create(name="r", owner=ada, spec={})
    attempt = Attempt.objects.create(run=run, number=1)
    found = Checkpoint.objects.create(run=run, attempt=attempt, step=20, kind="adapter", created_at=timezone.now())
    found.folder.mkdir(parents=True)
    (found.folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (found.folder / "adapter_config.json").write_text("{}")
    (found.folder / "README.md").write_text("<script>alert(1)</script>")
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "training_args.bin",
        "rollout_state.json",
    ):
        (found.folder / name).write_bytes(b"state")
    (found.folder / "nested").mkdir()
    (found.folder / "nested" / "ü 1.bin").write_bytes(b"deep")
    return found


def url(checkpoint: Checkpoint, name: str = "adapter_model.safetensors") -> str:
    return f"/checkpoints/{checkpoint.pk}/files/{name}"


def body(response: Any) -> bytes:
    return b"".join(response)


def test_a_whole_file_is_an_attachment(as_ada: Client, checkpoint: Checkpoint) -> None:
    answer = as_ada.get(url(checkpoint))
    assert (answer.status_code, body(answer)) == (200, WEIGHTS)
    assert answer.headers["Content-Length"] == str(len(WEIGHTS))
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="adapter_model.safetensors"'
    page = as_ada.get(url(checkpoint, "README.md"))
    assert page.headers["Content-Disposition"].startswith("attachment")
    assert body(as_ada.get(url(checkpoint, "nested/ü 1.bin"))) == b"deep"


@pytest.mark.parametrize(
    "header,first,last",
    [
        ("bytes=0-0", 0, 0), ("bytes=0-99", 0, 99), ("bytes=1000-", 1000, None), ("bytes=-10", -10, None),
        ("bytes=5-99999999999", 5, None), ("bytes=-99999999999", 0, None), (" bytes=7-8 ", 7, 8),
    ],
)  # fmt: skip
def test_a_range(as_ada: Client, checkpoint: Checkpoint, header: str, first: int, last: int | None) -> None:
    expected = WEIGHTS[first:] if last is None else WEIGHTS[first : last + 1]
    start = first if first >= 0 else len(WEIGHTS) + first
    answer = as_ada.get(url(checkpoint), headers={"Range": header})
    assert (answer.status_code, body(answer)) == (206, expected)
    assert answer.headers["Content-Range"] == f"bytes {start}-{start + len(expected) - 1}/{len(WEIGHTS)}"
    assert answer.headers["Content-Length"] == str(len(expected))
    head = as_ada.head(url(checkpoint), headers={"Range": header})
    assert (head.status_code, head.content) == (206, b"")
    assert head.headers["Content-Length"] == str(len(expected))


@pytest.mark.parametrize("header", [f"bytes={len(WEIGHTS)}-", "bytes=99999999-", "bytes=-0"])
def test_a_range_beyond_the_end_is_416(as_ada: Client, checkpoint: Checkpoint, header: str) -> None:
    answer = as_ada.get(url(checkpoint), headers={"Range": header})
    assert answer.status_code == 416
    assert answer.headers["Content-Range"] == f"bytes */{len(WEIGHTS)}"


@pytest.mark.parametrize("header", ["bytes=5-2", "bytes=-", "bytes=a-b", "items=0-1", "bytes=0-1,5-6", "bytes=٣-٤", ""])
def test_a_range_that_makes_no_sense_is_ignored(as_ada: Client, checkpoint: Checkpoint, header: str) -> None:
    answer = as_ada.get(url(checkpoint), headers={"Range": header})
    assert (answer.status_code, body(answer)) == (200, WEIGHTS)


def test_a_download_goes_on_only_with_the_same_file(as_ada: Client, checkpoint: Checkpoint) -> None:
    whole = as_ada.get(url(checkpoint))
    etag, date = whole.headers["ETag"], whole.headers["Last-Modified"]
    for condition in (etag, date):
        again = as_ada.get(url(checkpoint), headers={"Range": "bytes=100-", "If-Range": condition})
        assert (again.status_code, body(again)) == (206, WEIGHTS[100:])
    for condition in ('"other"', f"W/{etag}", "Mon, 01 Jan 2001 00:00:00 GMT", "nonsense"):
        again = as_ada.get(url(checkpoint), headers={"Range": "bytes=100-", "If-Range": condition})
        assert (again.status_code, body(again)) == (200, WEIGHTS)
    assert as_ada.get(url(checkpoint), headers={"If-None-Match": etag}).status_code == 304
    path = checkpoint.folder / "adapter_model.safetensors"
    path.write_bytes(WEIGHTS[::-1])
    os.utime(path, ns=(1, 1))
    changed = as_ada.get(url(checkpoint), headers={"Range": "bytes=100-", "If-Range": etag})
    assert (changed.status_code, body(changed)) == (200, WEIGHTS[::-1])


@pytest.mark.parametrize(
    "name",
    [
        "../../spec.yaml",
        "..%2f..%2fspec.yaml",
        "/etc/passwd",
        "outside.bin",
        "missing",
        "nested",
        "nested/",
        "link/passwd",
    ],
)
def test_nothing_outside_the_folder_is_sent(as_ada: Client, checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (checkpoint.run.folder / "spec.yaml").write_text("secret")
    (checkpoint.folder / "outside.bin").symlink_to(secret)
    (checkpoint.folder / "link").symlink_to("/etc")
    assert as_ada.get(url(checkpoint, name)).status_code == 404
    assert not {"outside.bin", "link/passwd"} & {file.name for file in files.listing(checkpoint)}


def test_a_link_inside_the_folder_is_followed(as_ada: Client, checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "again.safetensors").symlink_to("adapter_model.safetensors")
    assert body(as_ada.get(url(checkpoint, "again.safetensors"))) == WEIGHTS


def test_only_people_who_are_signed_in_download(checkpoint: Checkpoint) -> None:
    for path in (url(checkpoint), f"/checkpoints/{checkpoint.pk}/model.zip"):
        answer = Client().get(path)
        assert (answer.status_code, answer.headers["Location"].split("?")[0]) == (302, "/login/")
    assert Client().post(url(checkpoint)).status_code in (302, 405)
    assert Client().get("/checkpoints/999999999999999999999/files/x").status_code == 404


@pytest.mark.parametrize("part,count", [("model", 6), ("resume", 6), ("all", 12)])
def test_a_zip_is_stored_and_as_long_as_it_says(as_ada: Client, checkpoint: Checkpoint, part: str, count: int) -> None:
    answer = as_ada.get(f"/checkpoints/{checkpoint.pk}/{part}.zip")
    content = body(answer)
    assert answer.headers["Content-Length"] == str(len(content))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        infos = archive.infolist()
        assert len(infos) == count
        assert {info.compress_type for info in infos} == {zipfile.ZIP_STORED}
        names = {info.filename for info in infos}
        folder = answer.headers["Content-Disposition"].split('"')[1].removesuffix(".zip")
        assert all(name.startswith(f"{folder}/") for name in names)
        if part != "resume":
            assert archive.read(f"{folder}/adapter_model.safetensors") == WEIGHTS
            assert {f"{folder}/README.md", f"{folder}/run.yaml"} <= names
        assert (f"{folder}/optimizer.pt" in names) == (part != "model")
    assert as_ada.head(f"/checkpoints/{checkpoint.pk}/{part}.zip").headers["Content-Length"] == str(len(content))


def test_a_folder_that_is_gone_is_noticed(as_ada: Client, checkpoint: Checkpoint) -> None:
    gone = Checkpoint.objects.create(
        run=checkpoint.run, attempt=checkpoint.attempt, step=10, kind="full", created_at=timezone.now()
    )
    assert files.mark_deleted(checkpoint.run) == 1
    gone.refresh_from_db()
    assert gone.deleted_at is not None
    assert files.mark_deleted(checkpoint.run) == 0
    assert as_ada.get(f"/checkpoints/{gone.pk}/model.zip").status_code == 404


def test_the_api_lists_and_sends_the_same(checkpoint: Checkpoint, ada: User) -> None:
    _, text = ApiToken.create(ada, "t")
    api = Client(headers={"Authorization": f"Bearer {text}"})
    listed = api.get(f"/api/runs/{checkpoint.run_id}/checkpoints").json()
    assert [item["step"] for item in listed] == [20]
    parts = {file["name"]: file["part"] for file in listed[0]["files"]}
    assert parts["adapter_model.safetensors"] == "model"
    assert parts["optimizer.pt"] == parts["rollout_state.json"] == "resume"
    link = next(file["url"] for file in listed[0]["files"] if file["name"] == "adapter_model.safetensors")
    assert link.startswith("http://testserver/api/checkpoints/")
    answer = api.get(link, headers={"Range": "bytes=2-5"})
    assert (answer.status_code, body(answer)) == (206, WEIGHTS[2:6])
    assert api.head(link).headers["Content-Length"] == str(len(WEIGHTS))
    digest = api.get(f"/api/checkpoints/{checkpoint.pk}/sha256/adapter_config.json").json()["sha256"]
    assert digest == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert api.get(f"/api/checkpoints/{checkpoint.pk}/files/nothing").status_code == 404
    assert api.get(listed[0]["zip_url"]).status_code == 200


# The real server, as `make run` starts it, with a file that would not go unnoticed in memory.

BIG = 1024**3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str, psutil.Process, str]]:
    """(address, token, process, checkpoint id) of a uvicorn of its own, with a checkpoint that holds a sparse file of 1 GiB."""
    environment = {**os.environ, "OFFBEAT_HOME": str(tmp_path), "DJANGO_SETTINGS_MODULE": "webapp.settings"}
    environment.pop("DATABASE_URL", None)
    subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], env=environment, check=True)
    setup = f"""
from django.utils import timezone
from webapp.accounts.models import *; from webapp.runs.models import *; from webapp.checkpoints.models import *
user = User.objects.create_user("ada", password="x"); run = Run.objects.create(name="r", owner=user, spec={{}})
checkpoint = Checkpoint.objects.create(run=run, attempt=Attempt.objects.create(run=run, number=1), step=1, kind="full",
                                       created_at=timezone.now())
checkpoint.folder.mkdir(parents=True)
with open(checkpoint.folder / "model.safetensors", "wb") as file: file.truncate({BIG})
print(ApiToken.create(user, "t")[1], checkpoint.pk)
"""
    made = subprocess.run(
        [sys.executable, "manage.py", "shell", "-v0", "-c", setup],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    token, checkpoint_id = made.stdout.split()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "webapp.asgi:application",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    with subprocess.Popen(command, env=environment) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/api/health")
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline, "the server did not start within 60 s"
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}", token, psutil.Process(process.pid), checkpoint_id
        finally:
            process.terminate()


@pytest.mark.slow
def test_memory_does_not_grow_with_a_download(server: tuple[str, str, psutil.Process, str]) -> None:
    address, token, process, checkpoint_id = server
    http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=60)
    paths = ("files/model.safetensors", "zip")
    for path in paths:  # what is imported at the first request is not the download's
        with http.stream(
            "GET", f"{address}/api/checkpoints/{checkpoint_id}/{path}", headers={"Range": "bytes=0-9"}
        ) as warm:
            next(warm.iter_raw(10))
    for path in paths:
        idle = peak = process.memory_info().rss
        received = 0
        with http.stream("GET", f"{address}/api/checkpoints/{checkpoint_id}/{path}") as answer:
            assert answer.status_code == 200
            for index, chunk in enumerate(answer.iter_raw()):
                received += len(chunk)
                if index % 64 == 0:
                    peak = max(peak, process.memory_info().rss)
        assert received == int(answer.headers["Content-Length"])
        assert received >= BIG
        assert peak - idle < 64 * 2**20, f"{path}: {(peak - idle) / 2**20:.0f} MiB above idle"
