"""Run the tests so that two cores are kept busy: light ones in several processes, then real servers beside real browsers.

usage: test.py [pytest arguments]     with arguments, one pytest run with just these

Tests that run beside others write to a file, which is printed when they are over, so that no lines mix. The exit code is 1
when anything failed. Under CI=1 a machine without Chromium fails at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest"]
# A server and a trainer share the cores; waiting threads must sleep, not spin.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
# One more than cores: who waits until a kill is noticed computes nothing meanwhile.
PROCESSES = min(8, (os.cpu_count() or 1) + 1)
LIGHT, SERVERS, BROWSERS = "everything that needs no server", "real vLLM servers", "real browsers"
BOTH, GPUS = "a browser and a server", "GPUs"
SELECTIONS = {
    # Files begin in the order of tests/conftest.py, slow ones first; xdist would begin with those of the most tests.
    LIGHT: ["-m", "not server and not browser and not gpu", "-n", str(PROCESSES), "--dist", "loadfile",
            "--no-loadscope-reorder"],
    SERVERS: ["-m", "server and not browser and not gpu"],
    # A process of its own: Playwright leaves an event loop running, in which no asyncio test and no ORM call works.
    BROWSERS: ["-m", "browser and not server and not gpu"],
    BOTH: ["-m", "browser and server and not gpu"],
    GPUS: ["-m", "gpu"],
}  # fmt: skip
# One after the other; the parts of a stage side by side. Two servers at a time would be too much for two cores.
STAGES = [[LIGHT], [SERVERS, BROWSERS], [BOTH]]
# A server and its trainer compute all the time, a browser now and then: it goes first, since its tests wait for seconds only.
YIELDS = {SERVERS: ["nice", "-n", "5"]}


def main() -> int:
    if arguments := sys.argv[1:]:
        return subprocess.run([*PYTEST, *arguments], cwd=ROOT, env=ENVIRONMENT, check=False).returncode
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        if os.environ.get("CI"):
            say("ERROR: no Chromium, and under CI the browser tests must run")
            return 1
        say("WARNING: no Chromium, so the browser tests are SKIPPED")
    stages = STAGES
    if shutil.which("nvidia-smi"):
        stages = [*STAGES, [GPUS]]
    else:
        say("No GPU here (no nvidia-smi), so the tests marked gpu are not run")
    subprocess.run([sys.executable, "-m", "trainer_core.builtin_model", str(models())], cwd=ROOT, check=True)
    failed = [title for stage in stages for title in run(stage)]
    say(f"== failed: {', '.join(failed)}" if failed else "== all passed")
    return int(bool(failed))


def models() -> Path:
    folder = Path(os.environ.get("OFFBEAT_MODELS", ROOT / "var" / "models")) / "smollm2-135m-instruct"
    ENVIRONMENT["OFFBEAT_MODELS"] = str(folder.parent)
    return folder


def run(stage: list[str]) -> list[str]:
    """Run the parts of a stage side by side; returns the titles of those that failed."""
    say(f"== {', with '.join(stage)}")
    with ThreadPoolExecutor(len(stage)) as pool:
        codes = list(pool.map(lambda title: part(title, alone=len(stage) == 1), stage))
    return [title for title, code in zip(stage, codes, strict=True) if code]


def part(title: str, *, alone: bool) -> int:
    """Exit code of one pytest run. Alone it writes as it goes; else what it wrote is shown when it is over."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [*YIELDS.get(title, []), *PYTEST, *SELECTIONS[title], "--durations", "8"], cwd=ROOT, env=ENVIRONMENT, check=False,
            stdout=None if alone else output, stderr=None if alone else subprocess.STDOUT,
        )  # fmt: skip
        output.seek(0)
        say(output.read().decode(errors="replace") + f"== {title}: {time.monotonic() - began:.0f} s")
    return done.returncode


def say(text: str) -> None:
    """In one piece, so that lines of parts that end at the same time do not mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
