"""Two tiny models that load and serve in seconds: real architectures, random weights, one token per byte.

A folder holds config, weights and tokenizer with a chat template, as a hub model does. Folders are cached under
var/test-models and named by a hash of the file with their recipe, so that a change of it makes new ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CACHE = Path(__file__).resolve().parent.parent / "var" / "test-models"
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens, then <|endoftext|> (padding), <|im_start|> and <|im_end|> (end of a turn)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | float | None]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,  # large enough that logits are not flat
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _qwen3(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_sizes(tokenizer), tie_word_embeddings=False))


def _llama(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_sizes(tokenizer), tie_word_embeddings=True))


def model_folder(
    name: str,
    build: Callable[[PreTrainedTokenizerFast], PreTrainedModel],
    seed: int,
    recipe_file: Path = Path(__file__),
    **saving: bool,
) -> Path:
    """The cached folder of what `build` makes under this seed, beside the tokenizer. `recipe_file` says what it makes.

    `saving` are arguments of save_pretrained.
    """
    recipe = hashlib.sha256(recipe_file.read_bytes()).hexdigest()[:8]
    folder = CACHE / f"{name}-{seed}-{recipe}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        build(tokenizer).to(torch.float32).save_pretrained(building, **saving)
    tokenizer.save_pretrained(building)
    try:
        os.rename(building, folder)
    except OSError:  # another test process was first; its folder is the same
        shutil.rmtree(building)
        if not folder.exists():
            raise
    return folder


def tiny_qwen3(seed: int = 0) -> Path:
    """Folder of a Qwen3 of 0.38 million parameters, fp32, with its own output head."""
    return model_folder("tiny-qwen3", _qwen3, seed)


def tiny_llama(seed: int = 0) -> Path:
    """Folder of a Llama of 0.34 million parameters, fp32, whose output head is its embedding matrix."""
    return model_folder("tiny-llama", _llama, seed)


if __name__ == "__main__":
    print(tiny_qwen3())
    print(tiny_llama())
