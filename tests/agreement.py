"""Whether a server says the same log-probabilities as a trainer's model: of prompts, and of tokens that it sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import torch

from trainer_core.model import packed_log_probs

SAMPLED = 8
"""Tokens that the server adds to each prompt."""


class NoAnswer(RuntimeError):
    """What a server says instead of an answer."""


@dataclass(frozen=True)
class ServerSays:
    """Prompts with what the server sampled after them, and its log-probability of each token but the first."""

    sequences: list[list[int]]
    log_probs: list[np.ndarray]


def prompts(seed: int = 0) -> list[list[int]]:
    """Three prompts of 12 to 40 byte tokens that begin alike, longer than the windows of tests.tiny_families."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 256, 10).tolist()
    return [[*common, *rng.integers(0, 256, length).tolist()] for length in (2, 17, 30)]


def ask(url: str, model_name: str, sequences: list[list[int]]) -> ServerSays:
    """What the server says of each, one request after the other."""
    whole, log_probs = [], []
    for number, prompt in enumerate(sequences):
        request = {
            "model": model_name, "prompt": prompt, "max_tokens": SAMPLED, "temperature": 1.0, "seed": number,
            "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        response = httpx.post(f"{url}/v1/completions", json=request, timeout=120)
        if response.status_code != 200:
            raise NoAnswer(response.text)
        choice: dict[str, Any] = response.json()["choices"][0]
        known = [
            position[str(token)]["logprob"]
            for token, position in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ]
        whole.append([*prompt, *choice["token_ids"]])
        log_probs.append(np.array([*known, *choice["logprobs"]["token_logprobs"]]))
    return ServerSays(whole, log_probs)


def difference(said: ServerSays, model: Any) -> float:
    """The largest difference between what a server said and the model's own log-probabilities."""
    own = packed_log_probs(model, said.sequences)
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(own, said.log_probs, strict=True))


def disturb(model: torch.nn.Module, seed: int) -> None:
    """Change every weight that trains, by a tenth of its matrix's spread (0.1 for vectors, and for what is all zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                spread = float(parameter.std()) if parameter.ndim > 1 else 0.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.1 * (spread or 1.0) * noise.to(parameter)
