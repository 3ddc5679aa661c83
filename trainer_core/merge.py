"""Merges a LoRA adapter into its base model, in a process of its own.

    python -m trainer_core.merge --base MODEL --adapter FOLDER --output FOLDER

Writes a transformers folder with the adapter's tokenizer. One JSON line on stdout for each step of the way,
{"text": ..., "share": 0..1}; the last one is {"done": true} or {"failed": "<one sentence>"}. Ends when stdin does, so that it
does not outlive whoever started it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
from pathlib import Path

MEMORY_FACTOR = 1.3
"""Memory for each byte of the base model's weights: the weights, and the layer that is being merged."""


class CannotMerge(Exception):
    """The text is one sentence."""


def say(**record: object) -> None:
    print(json.dumps(record), flush=True)


def end_with_parent() -> None:
    """End this process when its standard input is closed."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock the interpreter would want at its end
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def merge(base: Path, adapter: Path, output: Path) -> None:
    """Raises CannotMerge before anything is loaded where disk or memory will not do, or a folder is not what it should be."""
    check(base, adapter, output)
    say(text="Starts PyTorch.", share=0.05)
    from peft import PeftModel
    from transformers import AutoConfig, AutoTokenizer

    from trainer_core.families import model_class

    say(text="Loads the base model.", share=0.15)
    model = model_class(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype="auto")
    say(text="Adds the adapter.", share=0.5)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(progressbar=False, safe_merge=True)
    say(text="Writes the weights.", share=0.7)
    merged.save_pretrained(output)
    holds_tokenizer = (adapter / "tokenizer_config.json").is_file()
    AutoTokenizer.from_pretrained(adapter if holds_tokenizer else base).save_pretrained(output)


def check(base: Path, adapter: Path, output: Path) -> None:
    import psutil

    if not (adapter / "adapter_config.json").is_file():
        raise CannotMerge(f"{adapter} has no adapter_config.json, so it is no adapter.")
    weights = [path for pattern in ("*.safetensors", "*.bin") for path in base.glob(pattern)]
    if not (base / "config.json").is_file() or not weights:
        raise CannotMerge(f"The base model {base} is not on this host any more; it needs a config.json and weights.")
    size = sum(path.stat().st_size for path in weights)
    free, memory = shutil.disk_usage(output.parent).free, psutil.virtual_memory().available
    if free < size * 1.05:
        raise CannotMerge(
            f"The merged model takes {_gib(size)} of disk and {_gib(free)} are free; delete something first."
        )
    if memory < size * MEMORY_FACTOR:
        raise CannotMerge(
            f"Merging takes about {_gib(size * MEMORY_FACTOR)} of memory and {_gib(memory)} are free; try again when less runs."
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Merges a LoRA adapter into its base model.")
    for name in ("base", "adapter", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    end_with_parent()
    try:
        merge(arguments.base, arguments.adapter, arguments.output)
    except CannotMerge as error:
        say(failed=str(error))
        sys.exit(1)
    # whatever a library raises: whoever waits gets one sentence, and the log the rest
    except Exception as error:
        say(failed=f"The adapter could not be merged: {type(error).__name__}: {' '.join(str(error).split())[:300]}.")
        raise
    say(done=True)


if __name__ == "__main__":
    main()
