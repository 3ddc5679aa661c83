"""What the trainer's processes tell one another besides tensors.

Rank 0 owns the rollout worker, the servers and the spool; the others only compute. It gives each rank its rows, and calls on
all of them for collectives that are not part of every step, such as gathering weights for a push.

Plain sockets rather than torch's collectives: each rank gets only what it needs, no GPU is involved, a wait may last as long
as generation takes, and the end of a process is seen at once instead of after a timeout. A process that is lost ends all
others: `lost` is called with one sentence, and the process exits.
"""

from __future__ import annotations

import atexit
import hmac
import os
import pickle
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

HANDSHAKE_S = 120.0
SIGN_OF_LIFE_S = 5.0
CAUSE_S = 5.0
"""How long a process whose collective broke waits for news of the one that broke it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HOST_NAME_BYTES = 255
"""The longest name of a host."""

# What gloo and NCCL say when another process is gone; neither has an exception of its own for it.
_BROKEN_COLLECTIVE = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|DistNetworkError|DistStoreError"
)


class RankLost(RuntimeError):
    """Another trainer process is gone; the text is one sentence."""


@dataclass(frozen=True)
class _Call:
    """rank 0 -> others: take part in something, then go on waiting."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Value:
    """What somebody waits for."""

    value: Any


@dataclass(frozen=True)
class _Failed:
    """others -> rank 0: why this process ends."""

    text: str


_ALIVE, _BYE = "alive", "bye"


@dataclass
class _Peer:
    """The other end of a connection."""

    rank: int
    host: str
    connection: Connection
    inbox: queue.SimpleQueue[_Call | _Value] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    last_sign: float = field(default_factory=time.monotonic)
    left: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.host == host_name() else f"rank {self.rank} on host {self.host}"

    def send(self, message: Any) -> int:
        """Bytes sent. An end of the stream is not told here: the reader sees it too, and tells it."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self.lock, suppress(BrokenPipeError, ConnectionResetError, OSError):
            self.connection.send_bytes(data)
        return len(data)


class Ranks:
    """This process's links to the others: rank 0 has one to each, each has one to rank 0.

    With one process all of it works and costs nothing. `lost` may be set; it is called once, from another thread, with the
    reason in one sentence, right before this process exits with code 1.
    """

    def __init__(self, rank: int, size: int, peers: Sequence[tuple[int, str, Connection]], silence_s: float) -> None:
        self.rank = rank
        self.size = size
        self.lost: Callable[[str], None] | None = None
        self._silence_s = silence_s
        self._peers = [_Peer(number, host, connection) for number, host, connection in peers]
        self._closed = threading.Event()
        self._failed = False
        self._end = threading.Lock()
        for peer in self._peers:
            threading.Thread(target=self._read, args=(peer,), name=f"rank-{peer.rank}", daemon=True).start()
        if self._peers:
            threading.Thread(target=self._show_life, name="sign-of-life", daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # ---- rank 0 -----------------------------------------------------------------------------------------------------

    def give(self, values: Sequence[Any]) -> int:
        """Answer `follow` on each rank k above 0 with `values[k]`. Returns the bytes sent."""
        return sum(peer.send(_Value(values[peer.rank])) for peer in self._peers)

    def release(self) -> None:
        """Answer `follow` on all other ranks with None."""
        for peer in self._peers:
            peer.send(_Value(None))

    def call(self, name: str, *arguments: Any) -> None:
        """Have all other ranks, which wait in `follow`, run the handler of that name."""
        for peer in self._peers:
            peer.send(_Call(name, arguments))

    def collect(self, own: Any, deadline_s: float) -> list[Any]:
        """The values that the ranks `hand_in`, in the order of ranks, `own` first.

        Raises RankLost when one does not come in time.
        """
        values = [own]
        for peer in self._peers:
            try:
                message = peer.inbox.get(timeout=deadline_s)
            except queue.Empty:
                raise RankLost(f"trainer {peer} did not finish its part within {deadline_s:.0f} s") from None
            assert isinstance(message, _Value), message
            values.append(message.value)
        return values

    # ---- the others -------------------------------------------------------------------------------------------------

    def follow(self, handlers: Mapping[str, Callable[..., None]]) -> Any:
        """Do what rank 0 calls for until it gives a value, and return that. Waits as long as rank 0 lives."""
        if self._closed.is_set():
            raise RankLost("the trainer ranks have parted, since training has ended; make a new trainer to train again")
        while True:
            message = self._peers[0].inbox.get()
            if isinstance(message, _Value):
                return message.value
            handlers[message.name](*message.arguments)

    def hand_in(self, value: Any) -> None:
        """Give rank 0 the value that it collects."""
        self._peers[0].send(_Value(value))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, text: str) -> None:
        """This process ends because of `error`; `text` says it in one sentence.

        Rank 0 returns and says so itself; another one tells rank 0, waits until that has ended, and does not return then.
        When the error only shows that another process is gone, that one's reason comes first.
        """
        if not self._peers or self._closed.is_set():
            return
        if isinstance(error, RankLost) or _BROKEN_COLLECTIVE.search(f"{type(error).__name__} {error}"):
            time.sleep(CAUSE_S)
        if not self.leads:
            self._peers[0].send(_Failed(text))
            time.sleep(HANDSHAKE_S)  # ended by the reader, as soon as rank 0 has ended
        self._failed = True
        self._closed.set()

    def close(self) -> None:
        """Leave in peace: the others may go on or end."""
        if not self._closed.is_set():
            self._closed.set()
            for peer in self._peers:
                peer.send(_BYE)

    def leave_torch(self) -> None:
        """At exit: end the process group. Left to the interpreter, taking it down does not end."""
        import torch.distributed as dist

        if self._failed:  # others may be in the middle of a collective, which a process group waits for
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _read(self, peer: _Peer) -> None:
        """Thread: take in what a peer sends, until it is gone."""
        while True:
            try:
                message = pickle.loads(peer.connection.recv_bytes())
            except (EOFError, OSError):
                break
            peer.last_sign = time.monotonic()
            if isinstance(message, _Failed):
                self._give_up(f"Trainer {peer}: {message.text}")
            elif message == _BYE:
                peer.left = True
            elif message != _ALIVE:
                peer.inbox.put(message)
        if not peer.left:
            hint = " without a word; it was killed, most often for lack of memory" if self.leads else ""
            self._give_up(f"Trainer {peer} ended{hint}.")

    def _show_life(self) -> None:
        """Thread: tell the others that this process lives, and notice when one of them does not."""
        looked = time.monotonic()
        while not self._closed.wait(SIGN_OF_LIFE_S):
            now, before, looked = time.monotonic(), looked, time.monotonic()
            for peer in self._peers:
                peer.send(_ALIVE)
                if now - before > 2 * SIGN_OF_LIFE_S:  # this process stood still itself; their signs wait to be read
                    peer.last_sign = now
                silent = now - peer.last_sign
                if silent > self._silence_s and not peer.left:
                    self._give_up(f"Trainer {peer} has given no sign of life for {silent:.0f} s.")

    def _give_up(self, text: str) -> None:
        """Say why, once, and end this process: its main thread may be caught in a collective that never returns."""
        with self._end:
            if not self._closed.is_set():
                print(text, file=sys.stderr)
                if (tell := self.lost or when_lost) is not None:
                    tell(text)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)


when_lost: Callable[[str], None] | None = None
"""Used where `Ranks.lost` is not set: while the trainer is being made."""

current = Ranks(0, 1, [], 0.0)
"""The links of this process. Made by `connect`; until then, and with one process, there is nobody else."""


def connect(rank: int, size: int, silence_s: float) -> Ranks:
    """Link this process with the others of its torch process group, which must exist. A collective: all ranks call it.

    Raises RankLost when they do not meet within HANDSHAKE_S.
    """
    global current
    if size == 1:
        current = Ranks(0, 1, [], silence_s)
        return current
    from accelerate.utils import broadcast_object_list

    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        if rank == 0:
            bound = "127.0.0.1" if address in LOOPBACK else ""
            with socket.create_server((bound, 0), backlog=size) as server:
                server.settimeout(HANDSHAKE_S)
                token = secrets.token_bytes(32)
                broadcast_object_list([(server.getsockname()[1], token, host_name())])
                peers = _accept(server, token, size - 1)
        else:
            meeting: list[Any] = [None]
            broadcast_object_list(meeting)
            port, token, host = meeting[0]
            stream = socket.create_connection((address, port), HANDSHAKE_S)
            peers = [(0, host, _connection(stream))]
            peers[0][2].send_bytes(token + rank.to_bytes(4, "big") + host_name().encode()[:HOST_NAME_BYTES])
    except OSError as error:
        raise RankLost(f"the trainer ranks did not meet at {address}: {error}") from error
    current = Ranks(rank, size, peers, silence_s)
    atexit.register(current.leave_torch)
    return current


def host_name() -> str:
    """What this machine is called where ranks are on several."""
    return os.environ.get("OFFBEAT_HOST") or socket.gethostname()


def _accept(server: socket.socket, token: bytes, count: int) -> list[tuple[int, str, Connection]]:
    """(rank, host, connection) of those who know the token, by rank."""
    found: dict[int, tuple[int, str, Connection]] = {}
    while len(found) < count:
        connection = _connection(server.accept()[0])
        with suppress(EOFError, OSError):  # a stranger: neither word nor length is ours
            word = connection.recv_bytes(len(token) + 4 + HOST_NAME_BYTES)
            known, rest = word[: len(token)], word[len(token) :]
            if hmac.compare_digest(known, token):
                rank = int.from_bytes(rest[:4], "big")
                found[rank] = (rank, rest[4:].decode(errors="replace"), connection)
    return [found[rank] for rank in sorted(found)]


def _connection(stream: socket.socket) -> Connection:
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(stream.detach())
