"""What a server is asked for, and where it tells the sampler's support.

top-k, top-p and min-p renormalise over the tokens that they leave, so the trainer has to know them. A server tells them as
a mask (POST /inference/v1/generate of a vLLM with --return-sampling-mask and --enable-scale-out), or else by the
log-probabilities of its `top_k` most likely tokens, among which those that were cut off stand out; that takes a
--max-logprobs of at least `top_k`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainer_core.config import AsyncGRPOConfig

EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)
"""Set in the task of an evaluation and what it starts: it samples its own way, and metrics of rollouts, tools and environments
are of training alone."""
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

    @classmethod
    def of_training(cls, config: AsyncGRPOConfig) -> Sampling:
        top = config.num_sampler_logprobs if config.score_centering else 0
        return cls(config.temperature, config.top_p, config.top_k, config.min_p, config.repetition_penalty, top)

    def of_evaluation(self, config: AsyncGRPOConfig) -> Sampling:
        """As in training but for what the evaluation has of its own; nobody looks at its log-probabilities."""
        temperature = self.temperature if config.eval_temperature is None else config.eval_temperature
        top_p = self.top_p if config.eval_top_p is None else config.eval_top_p
        return replace(self, temperature=temperature, top_p=top_p, top_log_probs=0)

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
