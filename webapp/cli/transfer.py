"""Following a run, and downloads that go on where they broke off."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from webapp.cli.client import Api, Failure, raise_for

ENDED = ("completed", "failed", "stopped", "lost")
FOLLOW_S = 1.0
PATIENCE_S = 120.0
"""How long a command that follows a run waits for a server that does not answer."""


def follow_run(api: Api, run_id: str, wanted: str = "completed") -> int:
    """Show steps and reward until the run ends. Returns 0 when it ended as wanted."""
    said = ""
    with tqdm(unit="step", dynamic_ncols=True, file=sys.stderr, disable=None) as bar:
        while True:
            run = patiently(lambda: api.call("GET", f"/runs/{run_id}"))
            summary = run["summary"]
            line = f"{run['state']}: {run['reason']}" if run["reason"] else run["state"]
            if line != said:
                bar.write(line, file=sys.stdout)
                sys.stdout.flush()
                said = line
            bar.total = summary.get("max_steps")
            bar.n = summary.get("step") or 0
            if summary.get("reward") is not None:
                bar.set_postfix(reward=f"{summary['reward']:.3f}", refresh=False)
            bar.refresh()
            if run["state"] in ENDED:
                break
            time.sleep(FOLLOW_S)
    if "step" in summary:
        print(f"{summary['step']} steps, reward {summary.get('reward')}")
    return 0 if run["state"] in (wanted, "completed") else 1


def patiently(ask: Callable[[], Any]) -> Any:
    """Ask again while the server is away, for two minutes at most; other failures end the command at once."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except Failure as failure:
            if failure.code != 3 or time.monotonic() > deadline:
                raise
            time.sleep(FOLLOW_S)


def download(api: Api, url: str, target: Path, size: int) -> None:
    """Fetch a file; one that broke off goes on where it ended, if the server's file is still the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part, tag = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.etag")
    headers = {}
    if part.exists() and tag.exists():
        headers = {"Range": f"bytes={part.stat().st_size}-", "If-Range": tag.read_text()}
    try:
        with api.stream(url, headers) as response:
            if response.status_code == 416:  # all of it was there already
                response.read()
            else:
                if response.is_error:
                    response.read()
                    raise_for(response)
                tag.write_text(response.headers.get("ETag", ""))
                mode = "ab" if response.status_code == 206 else "wb"
                with open(part, mode) as file:
                    for chunk in _shown(response, target.name, file.tell(), size):
                        file.write(chunk)
    except httpx.HTTPError as error:
        raise Failure(f"The download of {target.name} broke off ({error or type(error).__name__}); the same command goes "
                      "on with it.", 3) from error  # fmt: skip
    if part.stat().st_size != size:
        found = part.stat().st_size
        part.unlink()
        raise Failure(f"{target.name} has {found} bytes where {size} were expected; it changed meanwhile, try again.")
    part.replace(target)
    tag.unlink(missing_ok=True)


def _shown(response: httpx.Response, name: str, done: int, size: int) -> Iterator[bytes]:
    with tqdm(
        total=size, initial=done, unit="B", unit_scale=True, desc=name, file=sys.stderr, disable=None, leave=False
    ) as bar:
        for chunk in response.iter_raw():
            bar.update(len(chunk))
            yield chunk


def body(api: Api, url: str) -> Iterator[bytes]:
    try:
        with api.stream(url, {}) as response:
            if response.is_error:
                response.read()
                raise_for(response)
            yield from response.iter_bytes()
    except httpx.HTTPError as error:
        raise Failure(f"The download broke off: {error or type(error).__name__}.", 3) from error
