"""Fixtures shared by all tests. Numerical libraries get one thread: the vLLM server under test needs the other core."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.vllm_server import RunningServer

# Read when torch is first imported, which is later than this.
for _variable, _value in {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(_variable, _value)

# Servers under test share the processor, so how long an example takes says nothing about the code.
settings.register_profile("offbeat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("offbeat")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Files with slow tests come first: begun last, one of them would keep one process busy while the others have ended.

    Under `-n N --dist loadgroup` all server tests share one worker, so that one server runs at a time. Tests marked gpu are
    skipped where there is none.
    """
    for item in items:
        if item.get_closest_marker("server"):
            item.add_marker(pytest.mark.xdist_group("server"))
            if not item.get_closest_marker("timeout"):  # each may be the first, which starts the shared server
                item.add_marker(pytest.mark.timeout(1000))
    if gpu_items := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    yield  # pytest-django has an order of its own
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of a tiny Qwen3 with tokenizer and chat template."""
    from tests.tiny_model import tiny_qwen3

    return tiny_qwen3()


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The real server with the tiny model in float32, without LoRA. Starts in some 20 s; mark its users `server`.

    Tests share it: one that pushes weights pushes the original ones back, one that kills it takes `server_to_kill`.
    """
    from tests.vllm_server import running_server, tiny_spec

    log = tmp_path_factory.mktemp("tiny-server") / "server.log"
    with running_server(tiny_spec(), tiny_model, log, extra=["--enable-scale-out"]) as server:  # one route more
        yield server


@pytest.fixture
def server_to_kill(tiny_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; afterwards it is started again if it was left dead."""
    yield tiny_server
    if tiny_server.process.poll() is not None:
        tiny_server.start_again()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. One for all tests: a second Playwright in the process does not start beside the first one's loop."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=15_000)  # as for a page; beside a server that computes, five seconds are short
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        message = "there is no Chromium on this machine; install Debian's package 'chromium' to run the browser tests"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()
