"""Run the tests so that two cores are kept busy: light ones in several processes, then real servers beside real browsers.

usage: test.py [pytest arguments]     with arguments, one pytest run with just these

Of tests that run beside others the lines of progress are shown as they come, and the rest when they are over, so that no
reports mix. The exit code is 1 when anything failed. Under CI=1 a machine without Chromium fails at once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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
PROGRESS = re.compile(r"\[ *\d+%\]$")


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
    """Exit code of one pytest run. Alone it writes as it goes."""
    began = time.monotonic()
    command = [*YIELDS.get(title, []), *PYTEST, *SELECTIONS[title], "--durations", "8"]
    if alone:
        code = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False).returncode
    else:
        code = beside_others(title, command)
    say(f"== {title}: {time.monotonic() - began:.0f} s")
    return code


def beside_others(title: str, command: list[str]) -> int:
    report = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if PROGRESS.search(line):
                say(f"{title}: {line.rstrip()}")
            else:
                report.append(line)
    say("".join(report))
    return process.returncode


def say(text: str) -> None:
    """In one piece, so that lines of parts that end at the same time do not mix."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
