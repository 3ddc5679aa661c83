"""Run the tests in the order that uses two cores well: light ones in parallel, then those that own a vLLM server.

usage: test.py [pytest arguments]     with arguments, one pytest run with just these
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A server and a trainer share the cores; waiting threads must sleep, not spin.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
PHASES = [
    (
        "everything that needs no server",
        ["-m", "not server and not browser and not gpu", "-n", "2", "--dist", "loadfile"],
    ),
    ("real vLLM servers", ["-m", "server and not browser and not gpu"]),
    # A process of its own: Playwright leaves an event loop running, in which no asyncio test and no ORM call works.
    ("real browsers", ["-m", "browser and not gpu"]),
]


def main() -> int:
    if arguments := sys.argv[1:]:
        return pytest(arguments)
    if not shutil.which("chromium"):
        print("WARNING: no Chromium, so the browser tests are SKIPPED", file=sys.stderr, flush=True)
        if os.environ.get("CI"):
            return 1
    subprocess.run([sys.executable, "-m", "trainer_core.builtin_model", str(models())], cwd=ROOT, check=True)
    failed = 0
    for title, selection in PHASES:
        start = time.monotonic()
        print(f"== {title}", flush=True)
        failed |= pytest([*selection, "--durations", "8"])
        print(f"== {title}: {time.monotonic() - start:.0f} s", flush=True)
    return failed


def models() -> Path:
    folder = Path(os.environ.get("OFFBEAT_MODELS", ROOT / "var" / "models")) / "smollm2-135m-instruct"
    ENVIRONMENT["OFFBEAT_MODELS"] = str(folder.parent)
    return folder


def pytest(arguments: list[str]) -> int:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=ENVIRONMENT, check=False
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
