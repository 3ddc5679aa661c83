"""A studio in a temporary folder: its database, its web server, and this process set up to use its models."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0


def set_up(home: Path) -> None:
    """Django in this process, on a fresh database: SQLite in `home`, or what DATABASE_URL says."""
    home.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "OFFBEAT_HOME": str(home),
        "DJANGO_SETTINGS_MODULE": "webapp.settings",
        "CELERY_BROKER_URL": "memory://",
    }
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    call_command("collectstatic", interactive=False, verbosity=0)


@contextmanager
def web_server(home: Path) -> Iterator[str]:
    """Its address. One process, as `make run` starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open(home / "web.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--port", str(port), "--log-level", "warning"],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not _answers(f"http://127.0.0.1:{port}/api/health"):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the web server did not answer in {START_S:.0f} s: {home / 'web.log'}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
