"""A session with an OpenEnv server, over its WebSocket: no package of OpenEnv's, and none of the environment's, is needed.

Messages are JSON: {"type": "reset" | "step" | "close", "data": {...}} out, and back {"type": "observation", "data":
{"observation": {...}, "reward": number or null, "done": bool}} or {"type": "error", "data": {"message": ..., "code": ...}}.
GET /schema holds the JSON schema of an action. Each session is an environment of its own on the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Result:
    """What a reset or a step led to."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """Connects at the first reset, and again after a connection was lost. Calls have no deadline of their own: the caller's."""

    def __init__(self, base_url: str) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"the OpenEnv server's address is {base_url!r}; it must begin with http:// or https://")
        self.url = base_url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, **options: Any) -> Result:
        """Begin an episode. Raises RuntimeError with what the server, or the lack of one, said."""
        if self._socket is None or self._socket.closed:
            await self.close()
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S))
            try:
                self._socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise RuntimeError(f"the OpenEnv server at {self.url} cannot be reached: {error}") from error
        return await self._ask("reset", options)

    async def step(self, action: dict[str, Any]) -> Result:
        """Take an action. Raises RuntimeError as `reset` does, for an action that the server refuses as well."""
        return await self._ask("step", action)

    async def action_schema(self) -> dict[str, Any]:
        """The JSON schema of an action. Raises RuntimeError when the server does not tell."""
        assert self._http is not None, "reset connects"
        try:
            async with self._http.get(f"{self.url}/schema") as response:
                response.raise_for_status()
                schema: dict[str, Any] = (await response.json())["action"]
                return schema
        except (aiohttp.ClientError, KeyError, ValueError, TypeError) as error:
            raise RuntimeError(f"the OpenEnv server at {self.url} does not tell its actions: {error!r}") from error

    async def close(self) -> None:
        """Give the environment back to the server."""
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()
        self._socket = self._http = None

    async def _ask(self, kind: str, data: dict[str, Any]) -> Result:
        if self._socket is None:
            raise RuntimeError("the episode has not begun")
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive_json()
        except (aiohttp.ClientError, ConnectionError, TypeError) as error:  # TypeError: the socket was closed
            raise RuntimeError(f"the OpenEnv server at {self.url} ended the session: {error}") from error
        content = answer.get("data") or {}
        if answer.get("type") == "error":
            raise RuntimeError(f"{_problem(content)} ({content.get('code', 'no code')})")
        if answer.get("type") != "observation" or "observation" not in content:
            raise RuntimeError(f"the OpenEnv server at {self.url} answered a {kind} with {str(answer)[:200]}")
        return Result(content["observation"], content.get("reward"), bool(content.get("done")))


def _problem(content: dict[str, Any]) -> str:
    """What an error says; of an action with wrong fields which ones, so that a model can do better."""
    wrong = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in content.get("errors", ())]
    return "; ".join([str(content.get("message", "error")), *wrong])
