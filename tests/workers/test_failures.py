"""A failure is told in one sentence that says what to do, from logs as the programs write them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from workers import failures

OOM = """
[rank0]: Traceback (most recent call last):
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of
"""
GATED = """
huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1)
Cannot access gated repo for url https://huggingface.co/x/y/resolve/main/config.json.
"""
NCCL = "[E1130 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)\n"


@pytest.mark.parametrize(
    "log, words",
    [
        (OOM, ("GPU ran out of memory", "token_budget")),
        (f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}: 'x'\n", ("disk is full", "save_total_limit")),
        (NCCL, ("NCCL", "healthy")),
        (GATED, ("gated", "token")),
        ("KeyError: 'prompt'\n", ("no column 'prompt'",)),
        ("ModuleNotFoundError: No module named 'flash_attn'\n", ("'flash_attn' is not installed",)),
        ("ERROR [registry.py:1120] ModuleNotFoundError: No module named 'torchvision'\n", ("sees images", "a GPU")),
        ("AssertionError: CPU GDN attention requires BF16.\n", ("Gated DeltaNet", "server.dtype to bfloat16")),
    ],
)
def test_known_troubles_say_what_to_do(log: str, words: tuple[str, ...]) -> None:
    sentence = failures.explain("The trainer", 1, "some lines\n" + log + "more lines\n")
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_port_in_use_as_python_words_it() -> None:
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        code = f"import socket; socket.socket().bind(('127.0.0.1', {first.getsockname()[1]}))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    sentence = failures.explain("The server", result.returncode, result.stderr)
    assert "port" in sentence
    assert "resume" in sentence


def test_the_last_trouble_counts() -> None:
    assert "disk" in str(failures.recognise(OOM + "No space left on device\n"))
    assert "GPU" in str(failures.recognise("No space left on device\n" + OOM))


def test_an_unknown_exception_is_quoted() -> None:
    log = "Traceback (most recent call last):\n  File x\nacme.WeirdError: the frobnicator is at 7; 3 is allowed\n"
    assert failures.explain("The trainer", 1, log) == (
        "The trainer ended with code 1: acme.WeirdError: the frobnicator is at 7; 3 is allowed"
    )
    assert failures.explain("The trainer", 3, "nothing\n") == "The trainer ended with code 3; its log says why."


def test_a_kill_is_no_mystery_whatever_the_log_says() -> None:
    assert failures.explain("The trainer", -9, "No space left on device\n") == (
        "The trainer was killed by signal 9 (out of memory?); resume to go on from the last checkpoint."
    )
    assert "signal 11 (SIGSEGV)" in failures.explain("The trainer", -11, "")


def test_tail_reads_only_the_end_and_bad_bytes_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    assert failures.tail(path) == ""
    path.write_bytes(b"a" * 100 + b"\xff\xfe end\n")
    assert failures.tail(path, 10).endswith(" end\n")
    assert len(failures.tail(path, 10)) <= 10


def test_progress_bars_are_one_line() -> None:
    text = "start\n 1%|#\r 50%|##\r100%|###\n\n   \nlast\n"
    assert failures.last_lines(text) == ["start", "100%|###", "last"]
    assert failures.last_lines(text, 1) == ["last"]


def test_a_rank_that_was_killed_is_told_from_its_launchers_own_end() -> None:
    log = "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 0)\n  exitcode  : -9 (pid: 3272)\n"
    assert failures.rank_code(1, log) == -9
    assert failures.rank_code(1, log.replace("-9", "1")) == 1
    assert failures.explain("The trainer's part on host b", -9, log) == (
        "The trainer's part on host b was killed by signal 9 (out of memory?); resume to go on from the last checkpoint."
    )
