"""The sandboxed process: runs one reward function, locked in. Started by trainer_core.rewards.sandbox only.

Frames are a length (8 bytes, little-endian) and JSON. The first one from the parent holds source, function and limits; the
answer is the level of confinement, or the error of running the source. Each further one holds the arguments of a call.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from trainer_core.rewards.confinement import confine, limit_resources
from trainer_core.rewards.values import check_values

FILE_NAME = "<reward>"
_LENGTH = struct.Struct("<Q")


def main() -> None:
    answers_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    answers = os.fdopen(answers_fd, "wb")
    job = _read(requests)
    assert job is not None
    limit_resources(**job["limits"])
    level = ["process", "rlimits", *confine(Path.cwd(), Path(__file__).resolve().parent.parent, parent_pid)]
    function: Callable[..., Any] | None = None
    try:
        function = _load(job["source"], job["function"])
        _write(answers, {"level": level})
    # whatever the user's code raises, SystemExit and MemoryError included, is its result
    except BaseException as error:  # noqa: BLE001
        _write(answers, {"level": level, "error": _describe(error)})
    while function is not None and (request := _read(requests)) is not None:
        _write(answers, _answer(function, request))
    sys.stdout.flush()
    os._exit(0)


def _load(source: str, name: str) -> Callable[..., Any]:
    linecache.cache[FILE_NAME] = (len(source), None, source.splitlines(keepends=True), FILE_NAME)
    namespace: dict[str, Any] = {"__name__": "reward"}
    exec(compile(source, FILE_NAME, "exec"), namespace)
    function = namespace.get(name)
    if not callable(function):
        raise NameError(f"the source defines no function {name!r}")
    return function


def _answer(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        values = function(**_accepted(function, request))
        if inspect.isawaitable(values):
            values = asyncio.run(_finish(values))
        checked = check_values(values, len(request["completions"]), getattr(function, "__name__", "the function"))
        return {"values": checked, "seconds": time.perf_counter() - started}
    # as above
    except BaseException as error:  # noqa: BLE001
        return {"error": _describe(error), "seconds": time.perf_counter() - started}


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


async def _finish(values: Any) -> Any:
    return await values


def _describe(error: BaseException) -> dict[str, Any]:
    """Type, message and the line of the user's source; of the traceback only the user's own frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE_NAME]
    line = error.lineno if isinstance(error, SyntaxError) else (frames[-1].lineno if frames else None)
    text = str(error) or (f"exit code {error.code}" if isinstance(error, SystemExit) else "")
    shown = "".join(traceback.format_list(frames))[-8000:]
    return {"type": type(error).__name__, "message": text[:2000], "line": line, "traceback": shown}


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    header = stream.read(_LENGTH.size)
    if len(header) != _LENGTH.size:
        return None
    return json.loads(stream.read(_LENGTH.unpack(header)[0]))


def _write(stream: BinaryIO, value: dict[str, Any]) -> None:
    sys.stdout.flush()
    payload = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()


if __name__ == "__main__":
    main()
