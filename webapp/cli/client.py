"""The connection to a studio: where it is, and what it answers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class Failure(Exception):
    """Ends the command with a sentence and an exit code."""

    def __init__(self, sentence: str, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


def config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "offbeat" / "config.json"


class Api:
    """The JSON API of one studio. Every failure is raised as Failure with the server's own sentence."""

    def __init__(self, url: str, token: str) -> None:
        if not re.match(r"https?://[^/]", url):
            raise Failure(f"The address is {url!r}; it begins with http:// or https://.", 2)
        self.url = url.rstrip("/")
        self.http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=httpx.Timeout(60.0, connect=10.0)
        )

    @classmethod
    def configured(cls) -> Api:
        """From OFFBEAT_URL and OFFBEAT_TOKEN, or from what `offbeat login` stored."""
        stored: dict[str, str] = {}
        path = config_path()
        if path.exists():
            try:
                stored = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise Failure(f"{path} can't be read ({error}); run `offbeat login` again.", 3) from error
        url = os.environ.get("OFFBEAT_URL") or stored.get("url", "")
        token = os.environ.get("OFFBEAT_TOKEN") or stored.get("token", "")
        if not url or not token:
            raise Failure("Not logged in; run `offbeat login`, or set OFFBEAT_URL and OFFBEAT_TOKEN.", 3)
        return cls(url, token)

    def call(self, method: str, path: str, **request: Any) -> Any:
        """The answer's JSON, or None when it has none."""
        response = self.send(method, f"{self.url}/api{path}", **request)
        if response.status_code == 204:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise Failure(f"{self.url} answered with something that is not JSON; is it a studio?", 3) from error

    def send(self, method: str, url: str, **request: Any) -> httpx.Response:
        try:
            response = self.http.request(method, url, **request)
        except httpx.HTTPError as error:
            raise Failure(f"{self.url} can't be reached: {error or type(error).__name__}.", 3) from error
        raise_for(response)
        return response

    def stream(self, url: str, headers: dict[str, str]) -> Any:
        """A response whose body is read as it comes; a context manager."""
        return self.http.stream("GET", url, headers=headers)


def raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    if response.is_redirect:
        raise Failure(f"{response.url} sends the request elsewhere; is this the studio's address?", 3)
    try:
        body = response.json()
        detail = str(body["detail"])
    except (ValueError, KeyError, TypeError):
        raise Failure(f"{response.url} answered {response.status_code}; is it a studio?", 3) from None
    problems = body.get("problems", [])
    if len(problems) > 1:
        lines = [
            f"  {item['field']}: {item['message']}" if item["field"] else f"  {item['message']}" for item in problems
        ]
        detail = "\n".join([f"{len(problems)} things are wrong.", *lines])
    raise Failure(detail, 3 if response.status_code == 401 else 1)


def find_run(api: Api, text: str) -> dict[str, Any]:
    """A run by id, by the beginning of its id, or by its name, if that names one run only."""
    if UUID.fullmatch(text):
        return api.call("GET", f"/runs/{text.lower()}")
    found = [
        item
        for archived in ("false", "true")
        for item in api.call("GET", "/runs", params={"search": text, "archived": archived, "per_page": 500})["items"]
        if item["id"].startswith(text.lower()) or item["name"] == text
    ]
    if not found:
        raise Failure(f"There is no run {text!r}; `offbeat runs list` shows what there is.")
    if len(found) > 1:
        first = ", ".join(item["id"] for item in found[:4])
        raise Failure(
            f"{text!r} fits {len(found)} runs ({first}{', ...' if len(found) > 4 else ''}); give more of the id."
        )
    return api.call("GET", f"/runs/{found[0]['id']}")
