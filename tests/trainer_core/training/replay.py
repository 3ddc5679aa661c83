"""A tiny model and a rollout worker that replays made-up samples: what tests of the trainer need in place of a server."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer_core.rollout.types import RolloutSample
from trainer_core.sync import PushReport

VOCABULARY = 64
NUM_TOP = 8


def save_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """A two-layer Llama with random weights and a tokenizer of 64 words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2").save_pretrained(folder)
    return folder


def prompts(rows: int) -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{index % 50}"}]} for index in range(rows)])


def make_group(
    row_index: int, *, size: int = 4, epoch: int = 0, version: int = 0, seed: int = 0
) -> list[RolloutSample]:
    """Samples of one prompt: the same prompt tokens, completions of different lengths, made-up log-probabilities."""
    rng = np.random.default_rng([seed, epoch, row_index])
    prompt = rng.integers(3, VOCABULARY, 6)
    samples = []
    for index in range(size):
        completion = rng.integers(3, VOCABULARY, int(rng.integers(2, 9)))
        tokens = np.concatenate([prompt, completion])
        mask = np.concatenate([np.zeros(len(prompt), int), np.ones(len(completion), int)])
        top = np.full((len(tokens), NUM_TOP), -np.inf, dtype=np.float32)
        top_ids = np.zeros((len(tokens), NUM_TOP), dtype=np.int64)
        for place in range(len(prompt), len(tokens)):
            top_ids[place] = rng.permutation(VOCABULARY)[:NUM_TOP]
            top[place] = np.log(np.sort(rng.dirichlet(np.ones(NUM_TOP + 4)))[::-1][:NUM_TOP])
        samples.append(
            RolloutSample(
                group_id=f"{epoch}-{row_index}",
                rollout_id=f"{epoch}-{row_index}-{index}",
                row_index=row_index,
                epoch=epoch,
                weight_version=version,
                input_ids=tokens,
                completion_mask=mask,
                log_probs=np.where(mask, -4.0 + rng.normal(0, 0.3, len(tokens)), 0.0).astype(np.float32),
                advantage=float(rng.normal()),
                reward=float(rng.random()),
                truncated=False,
                queued_at=time.time(),
                group_size=size,
                top_ids=top_ids,
                top_log_probs=top,
            )
        )
    return samples


class ReplayWorker:
    """Gives out `samples` in order, without a process. `sent` holds what the trainer told it.

    Class attributes are set by the test before the trainer makes its worker.
    """

    samples: list[RolloutSample] = []
    messages: list[Any] = []
    current_version: bool = True
    made: list[ReplayWorker] = []

    def __init__(self, *, state: Any, **arguments: Any) -> None:
        self.state = state
        self.arguments = arguments
        self.sent: list[Any] = []
        self._left: deque[RolloutSample] = deque()

    def check_picklable(self) -> None:
        pass

    def start(self) -> None:
        done = self.state
        self._left = deque(s for s in type(self).samples if not done.is_done(s.epoch, s.row_index))
        type(self).made.append(self)

    def get(self, timeout: float) -> RolloutSample | None:
        if not self._left:
            raise AssertionError("the trainer asked for more samples than the test provided")
        sample = self._left.popleft()
        if self.current_version:
            sample.weight_version = self.state.weight_version
        return sample

    def queue_size(self) -> int:
        return len(self._left)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        messages, type(self).messages = type(self).messages, []
        return messages

    def stop(self) -> None:
        pass


class CountingSync:
    """A weight push that only remembers what it pushed."""

    def __init__(self) -> None:
        self.pushed: list[int] = []

    def open(self) -> None:
        pass

    def push(self, model: torch.nn.Module, version: int) -> PushReport:
        self.pushed.append(version)
        return PushReport(0.0, 0.0, 0.0)

    def reopen(self) -> list[str]:
        return []

    def model_name(self, version: int) -> str:
        return f"policy-v{version}"

    def close(self) -> None:
        pass
