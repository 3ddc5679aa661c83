"""A small hub on this machine for tests: models and datasets out of folders, behind a token where one is asked for.

It speaks as much of the hub's HTTP interface as huggingface_hub and datasets need to look at a repository and read its files.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by kind ("models", "datasets") and id; `private` ones are given to `token` alone."""

    def __init__(self) -> None:
        self.folders: dict[tuple[str, str], Path] = {}
        self.private: set[str] = set()
        self.token = "hf_of_ada_0123"
        self.asked: list[str] = []
        self.url = ""

    def add(self, kind: str, repo: str, folder: Path, *, private: bool = False) -> None:
        self.folders[kind, repo] = folder
        if private:
            self.private.add(repo)


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        shared = hub

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    shared: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}"))

    def log_message(self, *_: Any) -> None:
        """Quiet: `asked` has it."""

    def _answer(self, body: dict[str, Any] | None = None) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.shared.asked.append(f"{self.command} {path}")
        api = path.startswith("api/")
        words = path.removeprefix("api/").split("/")
        kind = words.pop(0) if words[0] in ("models", "datasets") else "models"
        repo, rest = "/".join(words[:2]), words[2:]
        folder = self.shared.folders.get((kind, repo))
        known = self.headers["Authorization"] == f"Bearer {self.shared.token}"
        if folder is None or (repo in self.shared.private and not known):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif api:
            self._send(*self._api(folder, repo, rest, body))
        else:
            self._file(folder / "/".join(rest[2:]))

    def _api(self, folder: Path, repo: str, rest: list[str], body: dict[str, Any] | None) -> tuple[int, bytes]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in files]
        if not rest or rest[0] == "revision":
            answer: Any = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names], "tags": []}
        elif rest[0] in ("tree", "paths-info"):
            wanted = "/".join(rest[2:]) if rest[0] == "tree" else None
            answer = [self._entry(folder, name) for name in names if not wanted or name.startswith(f"{wanted}/")]
            if body is not None:
                answer = [entry for entry in answer if entry["path"] in body["paths"]]
        else:
            return 404, b"{}"
        return 200, json.dumps(answer).encode()

    @staticmethod
    def _entry(folder: Path, name: str) -> dict[str, Any]:
        content = (folder / name).read_bytes()
        return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not begin:
            return self._send(200, content, headers)
        last = min(int(end or len(content)), len(content) - 1)
        part = content[int(begin) : last + 1]
        return self._send(206, part, headers | {"Content-Range": f"bytes {begin}-{last}/{len(content)}"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def gsm8k(folder: Path) -> Path:
    """A dataset laid out as openai/gsm8k: configurations main and socratic, columns question and answer."""
    entries = []
    for config in ("main", "socratic"):
        (folder / config).mkdir(parents=True)
        entries += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "test"):
            rows = [{"question": f"{config} {split} {n} + {n}?", "answer": str(2 * n)} for n in range(5)]
            (folder / config / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            entries += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join(["---", "configs:", *entries, "---", ""]))
    return folder
