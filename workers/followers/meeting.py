"""Where the trainer's ranks of several hosts meet, and over which network."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import psutil

from webapp.hosts.models import Host
from webapp.runs.models import Attempt
from workers import leases
from workers.preparation import CannotStart

PURPOSE = "trainer rendezvous"
"""Of the port that an attempt leases when its trainer starts: for its followers the sign to start theirs."""
LISTENS_IN_S = 120.0
"""How long the first host's ranks may take until they listen: interpreters that load torch from a cold disk."""
CONNECT_S = 5.0
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def open_for(attempt: Attempt) -> tuple[str, int]:
    """Lease the port, on the attempt's own host; returns (address, port). Raises NoPort."""
    assert attempt.host is not None, "a claimed attempt has a host"
    address = attempt.host.address if attempt.followers.exists() else "127.0.0.1"
    return address, leases.lease_port(attempt, PURPOSE)


def found_by(attempt: Attempt) -> tuple[str, int] | None:
    """The same for a follower; None while the first host is not so far."""
    port = attempt.ports.filter(purpose=PURPOSE).values_list("host__address", "port").first()
    return port and (port[0], port[1])


def reach(place: tuple[str, int], lead: str, own: str, tick: Callable[[], None]) -> None:
    """Wait until the ranks of host `lead` listen. Raises CannotStart with what is in the way when they can't be reached."""
    deadline = time.monotonic() + LISTENS_IN_S
    while True:
        try:
            socket.create_connection(place, CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise CannotStart(
                    f"Host {own} can't reach the trainer of host {lead} at {place[0]}:{place[1]} "
                    f"({error.strerror or error}); set OFFBEAT_ADDRESS of {lead} to an address that {own} reaches, and open "
                    "the ports between them."
                ) from error
        tick()


def network(host: Host | None, hosts: int) -> dict[str, str]:
    """Environment that keeps gloo and NCCL on the network of the host's address; empty for a trainer on one host.

    gloo would else take the address that the machine's own name stands for, which often is one of loopback. A variable that
    the host's operator has set stays.
    """
    interface = interface_of(host.address) if host is not None and hosts > 1 else None
    return {} if interface is None else {name: interface for name in NETWORK_VARIABLES if name not in os.environ}


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address or name; None when none has, as behind NAT."""
    try:
        numeric = socket.gethostbyname(address)
    except OSError:
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == numeric for entry in entries)), None)
