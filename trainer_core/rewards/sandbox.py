"""Runs reward functions that users wrote in a process that can harm nothing.

The process has an environment of its own with nothing of ours in it, its own session, a fresh folder, resource limits, and
a deadline for each call after which its whole group is killed. Where the kernel allows, it can read only the interpreter and
its packages, write only its folder, and open no socket and no process (`confinement`). Light: no torch, no numpy.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_core.rewards.source import Problem, function_name, validate_source
from trainer_core.rewards.values import check_values

_LENGTH = struct.Struct("<Q")
MAX_ANSWER_BYTES = 64 * 2**20
OUTPUT_TAIL_BYTES = 16 * 2**10
START_DEADLINE_S = 30.0
ENDING_S = 1.0
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "OFFBEAT_ATTEMPT")
FOLDER_PREFIX = "offbeat-sandbox-"


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandboxed process; `deadline_s` is for one call."""

    deadline_s: float = 600.0
    memory_mib: int = 2048
    cpu_s: int = 24 * 3600
    file_mib: int = 16
    open_files: int = 64
    processes: int = 64

    def as_arguments(self) -> dict[str, int]:
        return {
            "memory_bytes": self.memory_mib * 2**20,
            "cpu_s": self.cpu_s,
            "file_bytes": self.file_mib * 2**20,
            "open_files": self.open_files,
            "processes": self.processes,
        }


@dataclass(frozen=True)
class UserError:
    """What went wrong in the user's source. `line` counts from 1; None when no line of theirs is to blame."""

    type: str
    message: str
    line: int | None = None
    traceback: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.type}: {self.message}" if self.type != "ValueError" else f"{where}{self.message}"


class RewardError(RuntimeError):
    """A sandboxed reward function failed; `error` says how."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class SandboxResult:
    """What `score_once` saw. `values` has one list for each call that succeeded, `seconds` the time of each call made.

    `output` is the end of what the code printed; `level` what held it, such as "process + rlimits + landlock + seccomp".
    """

    values: list[list[float | None]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    output: str = ""
    error: UserError | None = None
    level: str = ""


def score_once(
    source: str, function_name: str, calls: list[dict[str, Any]], deadline_s: float, limits: Limits | None = None
) -> SandboxResult:
    """Run a reward function on some calls, each a dict of arguments (`completions` and more), within `deadline_s` in all.

    Never raises for anything the source does: the first failure ends it and is in `error`.
    """
    result = SandboxResult()
    deadline = time.monotonic() + deadline_s
    process = _Process(source, function_name, limits or Limits(cpu_s=int(deadline_s) + 1))
    try:
        process.start(min(START_DEADLINE_S, deadline_s))
        for call in calls:
            values, seconds = process.call(call, max(0.0, deadline - time.monotonic()))
            result.values.append(values)
            result.seconds.append(seconds)
    except RewardError as error:
        result.error = error.error
    finally:
        process.close()
    result.output, result.level = process.output, " + ".join(process.level)
    return result


class SandboxedReward:
    """A reward function from source, for training: picklable, and its process is kept for the next call.

    Raises RewardError when the function fails. A process that was killed is started anew at the next call.
    """

    def __init__(self, source: str, function_name: str, limits: Limits, name: str = "") -> None:
        self.source = source
        self.function_name = function_name
        self.limits = limits
        self.__name__ = name or function_name
        self._process: _Process | None = None

    def __call__(self, **arguments: Any) -> list[float | None]:
        if self._process is None:
            process = _Process(self.source, self.function_name, self.limits)
            process.start(START_DEADLINE_S)
            self._process = process
        try:
            return self._process.call(arguments, self.limits.deadline_s)[0]
        except RewardError:
            if self._process.ended:
                self._process = None
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}


class _Process:
    """One sandboxed process: requests in, answers and printed output out."""

    def __init__(self, source: str, function: str, limits: Limits) -> None:
        self._job = {"source": source, "function": function, "limits": limits.as_arguments()}
        self.level: list[str] = ["process"]
        self.ended = False
        self._output = bytearray()
        self._answers = bytearray()

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    def start(self, deadline_s: float) -> None:
        """Start and confine the process and run the source's top level. Raises RewardError when that fails."""
        _remove_leftovers()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
        read_end, write_end = os.pipe()
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment |= {"HOME": str(self._folder), "TMPDIR": str(self._folder), "PYTHONUTF8": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-m", "trainer_core.rewards.sandbox_child", str(write_end), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
            env=environment,
            cwd=self._folder,
            start_new_session=True,
        )
        os.close(write_end)
        self._answer_end = read_end
        for descriptor in (read_end, self._process.stdout.fileno(), self._process.stdin.fileno()):  # type: ignore[union-attr]
            os.set_blocking(descriptor, False)
        answer = self._exchange(self._job, deadline_s, "loading the source")
        self.level = [str(step) for step in answer.get("level", [])]
        self._raise_error(answer)

    def call(self, arguments: dict[str, Any], deadline_s: float) -> tuple[list[float | None], float]:
        """The rewards and the seconds the call took. Raises RewardError."""
        answer = self._exchange(arguments, deadline_s, "the call")
        self._raise_error(answer)
        try:
            values = check_values(answer.get("values"), len(arguments["completions"]), str(self._job["function"]))
        except ValueError as error:  # the process is not trusted to have checked them
            self.close()
            raise RewardError(UserError("ValueError", str(error))) from error
        return values, float(answer.get("seconds", 0.0))

    def close(self) -> None:
        """Kill the process group and remove its folder."""
        if self.ended or not hasattr(self, "_process"):
            return
        self.ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._drain_output()
        os.close(self._answer_end)
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        shutil.rmtree(self._folder, ignore_errors=True)

    def _raise_error(self, answer: dict[str, Any]) -> None:
        if (error := answer.get("error")) is not None:
            line = error.get("line")
            raise RewardError(
                UserError(
                    str(error.get("type")),
                    str(error.get("message")),
                    line if isinstance(line, int) else None,
                    str(error.get("traceback") or ""),
                )
            )

    def _exchange(self, request: dict[str, Any], deadline_s: float, doing: str) -> dict[str, Any]:
        """Send one frame and wait for the answer, taking in what is printed meanwhile."""
        deadline = time.monotonic() + deadline_s
        payload = json.dumps(request, default=str).encode()
        left = memoryview(_LENGTH.pack(len(payload)) + payload)
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()  # type: ignore[union-attr]
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(self._answer_end, selectors.EVENT_READ)
            while (answer := self._take_frame()) is None:
                wait = deadline - time.monotonic()
                if wait <= 0:
                    self.close()
                    raise RewardError(
                        UserError("Timeout", f"{doing} took longer than {deadline_s:g} s and was stopped")
                    )
                for key, _ in selector.select(wait):
                    if key.fd == stdin:
                        left = self._send(left)
                        if not left:
                            selector.unregister(stdin)
                    elif key.fd == stdout:
                        if not self._drain_output():
                            selector.unregister(stdout)
                    elif not self._take_answers():
                        self._raise_ended(doing)
        self._drain_output()
        return answer

    def _send(self, left: memoryview) -> memoryview:
        try:
            return left[os.write(self._process.stdin.fileno(), left) :]  # type: ignore[union-attr]
        except BrokenPipeError:
            return left[:0]  # it ended; the closed answer pipe says so next

    def _drain_output(self) -> bool:
        """Take in what was printed and keep its end; False at the end of the stream."""
        while True:
            try:
                chunk = os.read(self._process.stdout.fileno(), 65536)  # type: ignore[union-attr]
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._output += chunk
            del self._output[:-OUTPUT_TAIL_BYTES]
            if len(chunk) == 65536:
                return True  # let the deadline be looked at between big pieces

    def _take_answers(self) -> bool:
        chunk = os.read(self._answer_end, 65536)
        self._answers += chunk
        return bool(chunk)

    def _take_frame(self) -> dict[str, Any] | None:
        if len(self._answers) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._answers)
        if size > MAX_ANSWER_BYTES:
            self.close()
            raise RewardError(UserError("ValueError", f"the answer of {size} bytes is longer than {MAX_ANSWER_BYTES}"))
        if len(self._answers) < _LENGTH.size + size:
            return None
        payload = bytes(self._answers[_LENGTH.size : _LENGTH.size + size])
        del self._answers[: _LENGTH.size + size]
        try:
            answer = json.loads(payload)
        except ValueError as error:
            self.close()
            raise RewardError(UserError("ValueError", "the process sent an answer that is no JSON")) from error
        return answer if isinstance(answer, dict) else {}

    def _raise_ended(self, doing: str) -> None:
        deadline = time.monotonic() + ENDING_S  # its pipe closes a moment before it is dead
        look = (
            os.WEXITED | os.WNOHANG | os.WNOWAIT
        )  # leave it unreaped, so that its number stays its own until the kill
        while (seen := os.waitid(os.P_PID, self._process.pid, look)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.close()
        code = self._process.returncode if seen is not None else None
        how = {None: "closed its connection", 0: "exited"}.get(code, f"ended with exit code {code}")
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        raise RewardError(UserError("ProcessEnded", f"the process {how} during {doing}"))


def _remove_leftovers() -> None:
    """Folders of processes whose starter was killed before it could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


__all__ = [
    "Limits", "Problem", "RewardError", "SandboxResult", "SandboxedReward", "UserError", "function_name", "score_once",
    "validate_source",
]  # fmt: skip
