"""Why a process failed, in one sentence and with what to do about it, from its exit code and the end of its log."""

from __future__ import annotations

import re
import signal
from pathlib import Path

TAIL_BYTES = 64 * 1024

# First match wins, so the specific come before the general. The text may use groups of the pattern.
KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"CUDA out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "The GPU ran out of memory: lower training.token_budget or per_device_train_batch_size, turn gradient "
        "checkpointing on, or train with LoRA.",
    ),
    (
        r"No space left on device",
        "The disk is full: free some space, or keep fewer checkpoints (checkpoints.save_total_limit), and resume.",
    ),
    (
        r"Address already in use",
        "A port that the run had chosen was taken by another process meanwhile; resume to try with another one.",
    ),
    (
        r"NCCL error|NCCL timeout|ncclInternalError|ncclSystemError|ncclUnhandledCudaError|Watchdog caught collective",
        "NCCL, which moves tensors between GPUs, failed: look at the trainer's log, and check that the GPUs of the run "
        "are healthy and can reach each other.",
    ),
    (
        r"DefaultCPUAllocator: can't allocate memory|MemoryError",
        "The machine ran out of memory: use a smaller model or batch, or end other programs, and resume.",
    ),
    (
        r"is not a (?:local folder and is not a )?valid model identifier|Repo id must be in the form"
        r"|Can't load the configuration of",
        "The model was not found: give the id of a model on the hub, or a local folder that holds a config.json.",
    ),
    (
        r"GatedRepoError|403 Client Error.*huggingface",
        "The model or dataset is gated: accept its terms on the hub, and give the host a token that may read it.",
    ),
    (
        r"KeyError: '(prompt|messages)'",
        "The dataset has no column '\\1': rename a column of it, or choose another dataset.",
    ),
    (
        r"ModuleNotFoundError: No module named 'torchvision'",
        "vLLM loads this model with torchvision, which has no build beside CPU PyTorch: a model that sees images, and any "
        "Qwen3.5, needs a host with a GPU.",
    ),
    (
        r"CPU GDN attention requires BF16",
        "On a CPU, vLLM computes the Gated DeltaNet layers of this model in bfloat16 only: set server.dtype to bfloat16.",
    ),
    (
        r"ModuleNotFoundError: No module named '([^']+)'",
        "The Python package '\\1' is not installed on the host that ran this; install it there.",
    ),
)  # fmt: skip


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The last `size` bytes of a log as text; empty when there is none."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - size))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def last_lines(text: str, count: int = 20) -> list[str]:
    """The last lines that say something; what a carriage return overwrote is left out."""
    lines = (line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))
    return [line[:1000] for line in lines if line.strip()][-count:]


def recognise(log_text: str) -> str | None:
    """A sentence for the last trouble that is known, or None."""
    found = [
        (match.start(), -rank, match.expand(sentence))
        for rank, (pattern, sentence) in enumerate(KNOWN)
        for match in re.finditer(pattern, log_text)
    ]
    return max(found)[2] if found else None


def explain(what: str, returncode: int, log_text: str) -> str:
    """One sentence about the end of a process, `what` being its name as in "The trainer"."""
    # Whatever SIGKILL hit had no time to write down why; older lines of its log would mislead.
    known = None if returncode == -signal.SIGKILL else recognise(log_text)
    if known:
        return known
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else "unknown"
        hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
        return f"{what} was killed by signal {-returncode}{hint or f' ({name})'}; resume to go on from the last checkpoint."
    error = _last_exception(log_text)
    return f"{what} ended with code {returncode}" + (f": {error}" if error else "; its log says why.")


def rank_code(returncode: int, log_text: str) -> int:
    """The signal, as a negative code, that killed a process under `accelerate launch`; its own code is 1 whatever happened."""
    killed = re.search(r"^\s*exitcode\s*: (-\d+) ", log_text, re.M)
    return int(killed[1]) if killed else returncode


def _last_exception(log_text: str) -> str | None:
    """The line that ends the last Python traceback, e.g. "ValueError: no such thing"."""
    matches = re.findall(
        r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Refused|Interrupt)(?:: .*)?)$", log_text, re.M
    )
    return matches[-1][:500] if matches else None
