"""Where a webhook may go: public addresses only, so that nobody uses the studio to reach what only it can reach.

A name is resolved here and the connection goes to the address that was checked, so that a name can't change its mind in
between. Redirects are not followed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

ALLOWED_HOSTS = "OFFBEAT_WEBHOOK_HOSTS"
"""Environment variable: host names, separated by commas, that may be private, such as a chat server in the same network."""


class Forbidden(ValueError):
    """An address that is not called; the text is a sentence."""


@dataclass(frozen=True)
class Target:
    """`url` has the checked address in the place of the name; `host` is the Host header, `name` what TLS verifies."""

    url: str
    host: str
    name: str


def check(url: str) -> Target:
    """Where to connect for this address. Raises Forbidden."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Forbidden(f"{url!r:.80} is no web address; it must begin with https:// or http:// and a host.")
    if parts.username or parts.password:
        raise Forbidden("The address holds a name or password; leave them out.")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)]
    except (OSError, ValueError, UnicodeError) as error:
        raise Forbidden(f"The host {parts.hostname:.80} can't be found.") from error
    allowed = [name for name in os.environ.get(ALLOWED_HOSTS, "").split(",") if name]
    if parts.hostname not in allowed and (private := [address for address in found if not is_public(address)]):
        raise Forbidden(
            f"{parts.hostname:.80} is {private[0]}, an address inside this network; webhooks go to public addresses, or to "
            f"hosts that the variable {ALLOWED_HOSTS} names."
        )
    address = f"[{found[0]}]" if ":" in found[0] else found[0]
    where = urlunsplit((parts.scheme, f"{address}:{port}", parts.path or "/", parts.query, ""))
    return Target(where, parts.netloc, parts.hostname)


def is_public(text: str) -> bool:
    """Whether an IP address is one of the open internet; an IPv4 address inside an IPv6 one counts as itself."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if address in ipaddress.ip_network("64:ff9b::/96"):
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
    return address.is_global and not address.is_multicast
