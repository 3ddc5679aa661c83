"""As much of the Hugging Face hub as an upload needs, on this machine. Written after what huggingface_hub asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """`token` may write to names of `owner`. `files` are what was committed, `repos` the models that were made."""

    def __init__(self, token: str, owner: str) -> None:
        self.token, self.owner = token, owner
        self.repos: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.url = ""
        self._blobs: dict[str, bytes] = {}

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path.startswith("/upload/"):  # presigned: without a token
            self._blobs[path.rsplit("/", 1)[1]] = body
            return 200, {}
        if headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        repo = f"{self.owner}/m"
        if path == f"/api/models/{repo}":
            return 200, {"id": repo, "sha": "0" * 40, "siblings": [], "private": self.repos.get(repo, False)}
        if path == f"/api/models/{repo}/preupload/main":
            files = json.loads(body)["files"]
            return 200, {"files": [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False, "oid": None} for file in files
            ]}  # fmt: skip
        if path == f"/{repo}.git/info/lfs/objects/batch":
            return 200, {"transfer": "basic", "objects": [
                {**item, "actions": {"upload": {"href": f"{self.url}/upload/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]}  # fmt: skip
        if path == f"/api/models/{repo}/commit/main":
            self._commit(body)
            return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/{repo}/commit/{'1' * 40}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        return 404, {"error": f"no {method} {path}"}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        owner = wanted.get("organization") or self.owner
        if owner != self.owner:
            return 403, {"error": f"You don't have the rights to create a model under the namespace {owner!r}."}
        name = f"{owner}/{wanted['name']}"
        self.repos[name] = bool(wanted.get("private") or wanted.get("visibility") == "private")
        return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}

    def _commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self._blobs[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                self.files[value["path"]] = content


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = hub.answer(self.command, self.path, self.headers, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = do

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
