"""The routes of a vLLM server that a weight push needs, each with a deadline and errors of one sentence.

Facts about the routes: vLLM 0.26 to 0.33 started with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

ABANDON_DEADLINE_S = 20.0
"""A server that takes longer to end an update stands in a transfer whose sender is gone."""


class WeightSyncError(RuntimeError):
    """A push, or its set-up, failed; the message is one sentence."""


class ServerUnreachable(WeightSyncError):
    """The server at `url` does not answer: it died, hangs, or was never there."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(message)
        self.url = url


class ServerRefused(WeightSyncError):
    """The server at `url` answered with an error."""

    def __init__(self, url: str, message: str, status: int) -> None:
        super().__init__(message)
        self.url = url
        self.status = status


@dataclass(frozen=True)
class LoraLimits:
    """How the server was started for LoRA."""

    max_loras: int
    max_lora_rank: int


@dataclass(frozen=True)
class ServerInfo:
    """What a push must know of a server. `dtype` is a torch dtype name, `transfer_backend` None without one."""

    vllm_version: str
    base_model: str
    dtype: str
    max_model_len: int
    workers: int
    transfer_backend: str | None
    lora: LoraLimits | None


class ServerApi:
    """One server. Calls raise ServerUnreachable or ServerRefused."""

    def __init__(self, url: str, request_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(request_timeout_s, connect=10.0),
            # vLLM closes the connection just after answering 500; a call on a kept one would meet it half closed.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        self._client.close()

    def is_healthy(self) -> bool:
        """Whether /health answers 200 within five seconds."""
        try:
            return self._client.get("/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_healthy(self, deadline_s: float) -> None:
        """Poll /health twice a second. Raises ServerUnreachable after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not self.is_healthy():
            if time.monotonic() > end:
                raise ServerUnreachable(self.url, f"the server at {self.url} was not ready within {deadline_s:.0f} s")
            time.sleep(0.5)

    def info(self) -> ServerInfo:
        """Configuration of the server, from /server_info and /v1/models."""
        config = self._call("GET", "/server_info", params={"config_format": "json"})["vllm_config"]
        version = self._call("GET", "/version")["version"]
        models = self._call("GET", "/v1/models")["data"]
        workers = self._call("GET", "/get_world_size")["world_size"]
        lora, transfer = config.get("lora_config"), config.get("weight_transfer_config")
        return ServerInfo(
            vllm_version=version,
            base_model=next(model["id"] for model in models if not model.get("parent")),
            dtype=config["model_config"]["dtype"].removeprefix("torch."),
            max_model_len=config["model_config"]["max_model_len"],
            workers=workers,
            transfer_backend=transfer["backend"] if transfer else None,
            lora=LoraLimits(lora["max_loras"], lora["max_lora_rank"]) if lora else None,
        )

    def pause(self) -> None:
        """Freeze generation; requests in flight go on after `resume`."""
        self._call("POST", "/pause", params={"mode": "keep"})

    def resume(self) -> None:
        self._call("POST", "/resume")

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of old weights, those of running requests included: they are computed anew."""
        self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": init_info})

    def start_update(self) -> None:
        self._call("POST", "/start_weight_update", json={"is_checkpoint_format": True})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("POST", "/update_weights", json={"update_info": update_info})

    def finish_update(self, version: int) -> None:
        """Apply what was received. vLLM before 0.28 has no version here and ignores the body."""
        self._call("POST", "/finish_weight_update", json={"weight_version": str(version)})

    def abandon_update(self) -> None:
        """End an update that failed half-way, so that the next one may start.

        vLLM has no route for it, but closes an update that gets information it cannot parse.
        """
        request = {"update_info": {"abandoned": True}}
        try:
            self._call("POST", "/update_weights", json=request, timeout=ABANDON_DEADLINE_S)
        except ServerRefused:
            return

    def adapters(self) -> set[str]:
        """Names of the adapters that the server offers."""
        return {model["id"] for model in self._call("GET", "/v1/models")["data"] if model.get("parent")}

    def load_adapter(self, name: str, path: str) -> None:
        """Read the folder, once and now. A name that the server offers already is refused.

        vLLM's `load_inplace` would take such a name, but goes with every request under it: each engine step then reads the
        folder again.
        """
        self._call("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> bool:
        """Offer the adapter no longer; requests under way go on. False when the server did not have it."""
        try:
            self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        except ServerRefused as error:
            if error.status == 404:
                return False
            raise
        return True

    def _call(self, method: str, route: str, **request: Any) -> Any:
        try:
            response = self._client.request(method, route, **request)
        except httpx.TimeoutException as error:
            message = f"the server at {self.url} did not answer {method} {route} in time"
            raise ServerUnreachable(self.url, message) from error
        except httpx.TransportError as error:
            message = (
                f"the server at {self.url} cannot be reached for {method} {route}: {error or type(error).__name__}"
            )
            raise ServerUnreachable(self.url, message) from error
        if response.status_code != 200:
            raise ServerRefused(self.url, self._refusal(method, route, response), response.status_code)
        if response.headers.get("content-type", "").startswith("application/json"):
            return response.json()
        return response.text

    def _refusal(self, method: str, route: str, response: httpx.Response) -> str:
        if response.status_code == 404 and route.startswith("/v1/") and "Not Found" in response.text:
            needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
            return f"the server at {self.url} has no {route}: start it with {needs}"
        if response.status_code == 404 and "Not Found" in response.text:
            return f"the server at {self.url} has no {route}: start it with VLLM_SERVER_DEV_MODE=1"
        try:
            reason = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = response.text
        return f"the server at {self.url} refused {method} {route}: {' '.join(reason.split())[:500]}"
