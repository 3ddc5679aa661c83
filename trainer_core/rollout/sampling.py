"""What a server is asked for, and where it tells the sampler's support.

top-k, top-p and min-p renormalise over the tokens that they leave, so the trainer has to know them. A server tells them as
a mask (POST /inference/v1/generate of a vLLM with --return-sampling-mask and --enable-scale-out), or else by the
log-probabilities of its `top_k` most likely tokens, among which those that were cut off stand out; that takes a
--max-logprobs of at least `top_k`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SupportSource = Literal["whole", "mask", "log-probs", "unknown"]
"""`whole`: nothing is cut off. `unknown`: something is, and the server cannot tell what."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of every request. `top_log_probs` is how many of the sampler's top tokens are wanted."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    top_log_probs: int = 0

    @property
    def restricted(self) -> bool:
        """Whether the sampler draws from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)

    def source(self, *, mask: bool, max_log_probs: int) -> SupportSource:
        """Where a server tells the support. `mask`: it returns one; `max_log_probs`: its --max-logprobs, -1 for any number."""
        if not self.restricted:
            return "whole"
        if mask:
            return "mask"
        return "log-probs" if self.top_k and not 0 <= max_log_probs < self.top_k else "unknown"

    def asked_log_probs(self, source: SupportSource) -> int:
        """Log-probabilities to ask for at each position."""
        if source == "mask":  # there the sampled token takes one of the places
            return self.top_log_probs and self.top_log_probs + 1
        return max(self.top_log_probs, self.top_k) if source == "log-probs" else self.top_log_probs

    def request(
        self, source: SupportSource, model: str, prompt_ids: list[int], max_tokens: int, seed: int | None
    ) -> tuple[str, dict[str, Any]]:
        """Route and body of a completion."""
        parameters: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": self.asked_log_probs(source),
        }
        if self.top_k > 0:
            parameters["top_k"] = self.top_k
        if self.min_p is not None:
            parameters["min_p"] = self.min_p
        if seed is not None:
            parameters["seed"] = seed
        if source == "mask":
            body = {"model": model, "token_ids": prompt_ids, "sampling_params": parameters}
            return "/inference/v1/generate", body
        told = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return "/v1/completions", {"model": model, "prompt": prompt_ids, **parameters, **told}
