"""A PostgreSQL cluster of one's own: in a temporary folder, on a Unix socket, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Unavailable(Exception):
    """PostgreSQL can't be started here; the text says why."""


def find_binaries() -> Path | None:
    """Folder of initdb and pg_ctl; Debian keeps them out of PATH."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Environment variables that lead to it. Raises Unavailable."""
    binaries = find_binaries()
    if binaries is None:
        raise Unavailable("PostgreSQL is not installed")
    user: str | None = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        if "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
            raise Unavailable("PostgreSQL does not run as root, and there is no user 'postgres'")
        user = "postgres"
    with tempfile.TemporaryDirectory(prefix="offbeat-pg-") as text:  # short: sockets allow some hundred characters
        folder = Path(text)
        if user:
            shutil.chown(folder, user)

        def run(*command: str) -> None:
            done = subprocess.run(
                command, capture_output=True, text=True, user=user, cwd=folder, timeout=120, check=False
            )
            if done.returncode:
                raise Unavailable(done.stdout + done.stderr)

        run(f"{binaries}/initdb", "-D", f"{folder}/data", "-U", "offbeat", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        run(f"{binaries}/pg_ctl", "start", "-w", "-D", f"{folder}/data", "-l", f"{folder}/log", "-o", options)
        try:
            yield {"DATABASE_URL": "postgresql://offbeat@/postgres", "PGHOST": text}
        finally:
            run(f"{binaries}/pg_ctl", "stop", "-w", "-m", "immediate", "-D", f"{folder}/data")
