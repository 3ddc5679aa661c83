"""What a vLLM server's log says: how far it is on its way up, and why it ended. Its command is webapp/runs/commands.py's."""

from __future__ import annotations

import re
import signal

from webapp.runs.commands import Command, Device, serve_command, uses_adapter_sync

__all__ = ["Command", "Device", "readiness", "serve_command", "startup_failure", "uses_adapter_sync"]

# What vLLM 0.32 logs on its way up, in this order; the last one found is how far it is.
_PROGRESS = (
    ("non-default args", "reading the configuration"),
    ("Resolved architecture", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing the model"),
    ("GPU KV cache size", "warming up"),
    ("CPU KV cache size", "warming up"),
    ("init engine", "opening the HTTP routes"),
    ("Application startup complete", "ready"),
)


def readiness(log_text: str) -> str:
    """How far a starting server is, as a phrase such as "loading weights"."""
    return next((phrase for mark, phrase in reversed(_PROGRESS) if mark in log_text), "importing vLLM")


# First match wins. Groups of the pattern may stand in the sentence.
_FAILURES: tuple[tuple[str, str], ...] = (
    (
        r"Address already in use",
        "Another program took the port that the server was to listen on; start the run again to get another one.",
    ),
    (
        r"unrecognized arguments: (.+)",
        "This vLLM does not know the arguments {0}; install a version that Offbeat is tested with (README).",
    ),
    (
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=(\d+)",
        "server.max_model_len is {0}, but the model's context ends at {1}; set it to at most {1}.",
    ),
    (
        r"max seq len \((\d+)\)[^\n]*?KV cache is needed[^\n]*?available KV cache memory \(([^)]*)\)",
        "A context of server.max_model_len {0} does not fit into the KV cache of {1}; lower it, or raise "
        "server.kv_cache_gib.",
    ),
    (
        r"No available memory for the cache blocks",
        "The model leaves no memory for a KV cache; raise server.gpu_memory_utilization or take a smaller model.",
    ),
    (
        r"CUDA out of memory|torch\.OutOfMemoryError|Free memory on device .* is less than desired",
        "The GPU has too little free memory; lower server.gpu_memory_utilization or server.max_model_len, or free it.",
    ),
    (
        r"Available memory on node \d+ \(([\d.]+)/[\d.]+ GiB\)[^\n]*?requested memory for kv \(([\d.]+) GiB\)",
        "On this host only {0} GiB are free, but the KV cache is to take {1} GiB; lower server.kv_cache_gib.",
    ),
    (
        r"can't allocate memory|Cannot allocate memory|MemoryError|Not enough memory|not enough memory",
        "The machine has too little free memory; lower server.kv_cache_gib, take a smaller model, or end other programs.",
    ),
    (
        r"Repo id must be in the form[^\n]*?: '([^']+)'",
        "The model folder {0} does not exist on this host; give an existing folder or the id of a model on the hub.",
    ),
    (
        r"Invalid repository ID or local directory specified: '([^']+)'",
        "{0} is not a model: a folder with a config.json, or the id of a model on the hub, is needed.",
    ),
    (
        r"has model type `([^`]+)` but Transformers does not recognize",
        "The model has type {0}, which this version of vLLM cannot serve; choose another model.",
    ),
    (
        r"Model architectures \[([^\]]+)\] are not supported",
        "The model has architecture {0}, which this version of vLLM cannot serve; choose another model.",
    ),
    (
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'https://huggingface.co'",
        "The model is not in the cache of this host and the hub cannot be reached; give a local folder.",
    ),
    (
        r"EngineDeadError|Engine core proc \w+ died|died unexpectedly",
        "The server's engine process died while it was running; it is started again, and its log shows what it did last.",
    ),
)


def startup_failure(log_text: str, returncode: int) -> str:
    """Why a server ended, in one sentence with what to do, from its log and exit code (negative: a signal)."""
    for pattern, sentence in _FAILURES:
        if match := re.search(pattern, log_text):
            return sentence.format(*match.groups())
    if returncode == -signal.SIGKILL:
        return "The server was killed (SIGKILL), most often by a machine that ran out of memory; lower server.kv_cache_gib."
    errors = re.findall(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(\w*(?:Error|Exception): .+)$", log_text, flags=re.MULTILINE)
    how = f"by signal {-returncode}" if returncode < 0 else f"with code {returncode}"
    return (
        f"The server ended {how}: {errors[-1].strip(' .')[:300]}."
        if errors
        else f"The server ended {how}; see its log."
    )
