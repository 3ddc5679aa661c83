"""Processes that run reward functions, so that a call that hangs can be killed and a crash takes nothing else along.

A *zygote* is forked once, before the rollout worker starts threads. It holds the functions and forks a reward process each
time the pool asks for one: in milliseconds, where a fresh interpreter would import for seconds. Each reward process has
its own session, so that killing its group takes along what it started, and dies with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from trainer_core.rewards import RewardFunction, reward_name
from trainer_core.rewards.values import check_values

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<Q")


def die_with_parent(expected_parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != expected_parent:
        os._exit(1)


class Zygote:
    """Handle of the zygote process. Create it before any thread is started; it closes the file descriptors in `close`."""

    def __init__(self, functions: Sequence[RewardFunction], close: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            for descriptor in close:
                os.close(descriptor)
            die_with_parent(parent)
            _serve_forks(theirs, functions)
        theirs.close()
        self._socket = ours

    def fork(self) -> tuple[int, socket.socket]:
        """A new reward process: its pid (and group), and the socket to it. Raises OSError when the zygote is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            answer = self._socket.recv(_LENGTH.size)
        if len(answer) != _LENGTH.size:
            ours.close()
            raise OSError("the process that starts reward processes is gone")
        return int(_LENGTH.unpack(answer)[0]), ours

    def close(self) -> None:
        self._socket.close()


def _serve_forks(control: socket.socket, functions: Sequence[RewardFunction]) -> None:
    """The zygote's whole life. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            die_with_parent(zygote)
            for number in (
                signal.SIGCHLD,
                signal.SIGINT,
                signal.SIGTERM,
            ):  # what reward code starts should see the usual
                signal.signal(number, signal.SIG_DFL)
            _serve_calls(socket.socket(fileno=descriptors[0]), functions)
        os.close(descriptors[0])
        control.sendall(_LENGTH.pack(pid))


def _serve_calls(connection: socket.socket, functions: Sequence[RewardFunction]) -> None:
    """A reward process's whole life. Never returns."""
    stream = connection.makefile("rwb")
    while True:
        try:
            header = stream.read(_LENGTH.size)
        except ConnectionResetError:  # the worker is gone
            header = b""
        if len(header) != _LENGTH.size:
            os._exit(0)
        index, arguments = pickle.loads(stream.read(_LENGTH.unpack(header)[0]))
        stream.write(encode(_call(functions[index], arguments)))
        stream.flush()


def _call(function: RewardFunction, arguments: dict[str, Any]) -> tuple[str, Any]:
    """("ok", rewards) or ("error", (one sentence, traceback))."""
    name = reward_name(function)
    try:
        values = function(**arguments)
        if inspect.isawaitable(values):
            values = asyncio.run(_finish(values))
        return "ok", check_values(values, len(arguments["completions"]), name)
    # whatever a user's function raises, SystemExit included, is data here
    except BaseException as error:  # noqa: BLE001
        text = str(error) or type(error).__name__
        sentence = (
            text if isinstance(error, ValueError) and text.startswith(f"{name} ") else f"{type(error).__name__}: {text}"
        )
        return "error", (sentence[:1000], traceback.format_exc()[-8000:])


async def _finish(values: Any) -> Any:
    return await values


def encode(value: Any) -> bytes:
    """A length-prefixed pickle; both ends are processes of this run."""
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


async def read_message(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises asyncio.IncompleteReadError when the process died."""
    header = await reader.readexactly(_LENGTH.size)
    return pickle.loads(await reader.readexactly(_LENGTH.unpack(header)[0]))
