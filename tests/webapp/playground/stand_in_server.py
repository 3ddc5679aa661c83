"""A server with the parts of vLLM's that the playground asks for: models, adapters, chat in a stream."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Answers with the model's name and the last message, word by word. `asked` holds the bodies of chat requests."""

    def __init__(self, adapters: list[str]) -> None:
        self.adapters = adapters
        self.loaded: list[tuple[str, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.delay_s = 0.0
        self.refuses_adapters = ""
        self.port = 0

    def models(self) -> dict[str, Any]:
        base = {"id": "policy", "parent": None, "max_model_len": 512}
        return {"data": [base, *({"id": name, "parent": "policy"} for name in self.adapters)]}

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        words = f"{body['model']} heard: {body['messages'][-1]['content']}".split(" ")
        for index, word in enumerate(words):
            yield {"choices": [{"delta": {"content": word if index == 0 else f" {word}"}, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": {"completion_tokens": len(words)}}


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._json(200, server.models() if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/load_lora_adapter":
                if server.refuses_adapters:
                    return self._json(400, {"error": {"message": server.refuses_adapters}})
                if (body["lora_name"], body["lora_path"]) in server.loaded:
                    return self._json(400, {"error": {"message": "The lora adapter has already been loaded."}})
                server.loaded.append((body["lora_name"], body["lora_path"]))
                return self._json(200, {})
            server.asked.append(body)
            if server.refusal is not None:
                return self._json(*server.refusal)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in server.events(body):
                time.sleep(server.delay_s)
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def _json(self, status: int, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", server.port), Handler)
    server.port = listening.server_port
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
