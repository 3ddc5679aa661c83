"""Reading vLLM's answers: completions with their log-probabilities, metrics, errors. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson

from trainer_core.rollout.sampling import Sampling, SupportSource
from trainer_core.rollout.types import Support, TurnRecord

CUT_OFF = -9000.0
"""vLLM reports tokens outside top-k/top-p with log-probability -9999."""
TOKEN_PREFIX = "token_id:"
NEWER = "vLLM 0.26 or newer is needed"


class GenerationError(RuntimeError):
    """One request failed for good; the server itself is well."""


@dataclass
class ServerMetrics:
    """What /metrics says. Totals run from the server's start."""

    kv_usage: float
    running: float
    waiting: float
    preemptions: float
    prefix_queries: float
    prefix_hits: float


def parse_choice(
    choice: dict[str, Any], prompt_ids: list[int], sampling: Sampling, source: SupportSource, version: int
) -> TurnRecord:
    """A TurnRecord from one choice of an answer. Raises GenerationError when the answer is not what was asked."""
    try:
        return _turn(choice, prompt_ids, sampling, source, version)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise GenerationError(f"the server's answer has another form than vLLM's ({error!r})") from None


def _turn(
    choice: dict[str, Any], prompt_ids: list[int], sampling: Sampling, source: SupportSource, version: int
) -> TurnRecord:
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if ids is None or logprobs is None:
        raise GenerationError(f"the server's answer lacks token ids or their log-probabilities; {NEWER}")
    if not set(map(type, ids)) <= {int} or not all(0 <= token < 2**31 for token in ids):
        raise GenerationError(f"the server's token ids are no token ids: {str(ids)[:100]}")
    log_probs, entries = (_generated if source == "mask" else _completed)(logprobs)
    if len(log_probs) != len(ids):
        raise GenerationError(
            f"the server's answer has {len(ids)} tokens and {len(log_probs)} log-probabilities; {NEWER}"
        )
    if not set(map(type, log_probs)) <= {float, int} or not all(map(math.isfinite, log_probs)):
        raise GenerationError(f"the server's log-probabilities are no numbers: {str(log_probs)[:100]}")
    asked = sampling.asked_log_probs(source)
    if asked and (len(entries.counts) != len(ids) or entries.counts.max(initial=0) > asked + 1):
        raise GenerationError(
            f"the server was asked for {asked} log-probabilities at each of {len(ids)} tokens, and gave "
            f"{entries.counts.max(initial=0)} at {len(entries.counts)}"
        )
    support = None
    if source == "mask":
        support = parse_mask(choice.get("sampling_mask"), len(ids))
    elif source == "log-probs":
        kept = entries.values >= CUT_OFF
        counts = np.bincount(entries.rows[kept], minlength=len(ids)).astype(np.int32)
        support = Support(counts, entries.tokens[kept].astype(np.int32))
    top = sampling.top_log_probs
    top_ids, top_log_probs = entries.top(top, asked) if top else (None, None)
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=ids,
        output_log_probs=log_probs,
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        finish_reason=str(choice.get("finish_reason")),
        weight_version=version,
        support=support,
    )


@dataclass
class Entries:
    """Log-probabilities of several tokens at each of T positions, one after another: `counts` has shape [T]."""

    counts: np.ndarray
    tokens: np.ndarray
    values: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """The position of each entry."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def top(self, top: int, asked: int) -> tuple[np.ndarray, np.ndarray]:
        """[T, top] ids and log-probabilities of the most likely tokens; -inf pads.

        vLLM puts the sampled token first, and adds it when it is not among the `asked` most likely ones: then a position has
        asked + 1 entries.
        """
        # Place of each entry in its row; an additional first one falls out at -1.
        ends = np.cumsum(self.counts)
        columns = np.arange(len(self.tokens)) - np.repeat(ends - self.counts + (self.counts > asked), self.counts)
        kept = (columns >= 0) & (self.values >= CUT_OFF)
        rows = self.rows[kept]
        ids = np.zeros((len(self.counts), asked), dtype=np.int32)
        log_probs = np.full((len(self.counts), asked), -np.inf, dtype=np.float32)
        ids[rows, columns[kept]] = self.tokens[kept]
        log_probs[rows, columns[kept]] = self.values[kept]
        if asked > top:
            best = np.argsort(-log_probs, axis=1, kind="stable")[:, :top]
            return np.take_along_axis(ids, best, 1), np.take_along_axis(log_probs, best, 1)
        return ids, log_probs


def _completed(logprobs: dict[str, Any]) -> tuple[list[float], Entries]:
    """Log-probabilities in the form of /v1/completions: tokens are named "token_id:<id>"."""
    positions: list[dict[str, float]] = logprobs["top_logprobs"] or []
    counts = np.fromiter(map(len, positions), dtype=np.intp, count=len(positions))
    total = int(counts.sum())
    # One long text of numbers is read much faster than tens of thousands of short ones.
    text = ",".join(chain.from_iterable(positions)).replace(TOKEN_PREFIX, "")
    tokens = np.fromstring(text, dtype=np.int64, sep=",") if total else np.empty(0, dtype=np.int64)
    if len(tokens) != total:
        raise GenerationError(f"the server's log-probabilities are not named by token ids; {NEWER}")
    values = np.fromiter(chain.from_iterable(map(dict.values, positions)), dtype=np.float32, count=total)
    return logprobs["token_logprobs"], Entries(counts, tokens, values)


def _generated(logprobs: dict[str, Any]) -> tuple[list[float], Entries]:
    """Log-probabilities in the form of /inference/v1/generate."""
    content = logprobs["content"]
    tops = [position["top_logprobs"] for position in content]
    counts = np.fromiter(map(len, tops), dtype=np.intp, count=len(tops))
    entries = list(chain.from_iterable(tops))
    tokens = np.fromiter((entry["token_id"] for entry in entries), dtype=np.int64, count=len(entries))
    values = np.fromiter((entry["logprob"] for entry in entries), dtype=np.float32, count=len(entries))
    return [position["logprob"] for position in content], Entries(counts, tokens, values)


def parse_mask(mask: list[list[int]] | None, tokens: int) -> Support:
    """The sampler's support from the mask of /inference/v1/generate. Raises GenerationError when it is not whole."""
    if mask is None or len(mask) != tokens:
        found = "none" if mask is None else f"one of {len(mask)}"
        raise GenerationError(f"the server was asked for the sampling mask of {tokens} tokens and gave {found}")
    counts = np.fromiter(map(len, mask), dtype=np.int32, count=tokens)
    return Support(counts, np.fromiter(chain.from_iterable(mask), dtype=np.int32, count=int(counts.sum())))


def parse_metrics(text: str) -> ServerMetrics | None:
    """The numbers we need from the Prometheus text; None when they are not in it. Several engines are summed."""
    names: dict[str, Callable[[list[float]], float]] = {
        "vllm:kv_cache_usage_perc": max,
        "vllm:num_requests_running": sum,
        "vllm:num_requests_waiting": sum,
        "vllm:num_preemptions_total": sum,
        "vllm:prefix_cache_queries_total": sum,
        "vllm:prefix_cache_hits_total": sum,
    }
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in names:
            value = float(line.rpartition(" ")[2])
            found.setdefault(name, []).append(0.0 if math.isnan(value) else value)
    if "vllm:kv_cache_usage_perc" not in found:
        return None
    return ServerMetrics(*(combine(found.get(name, [0.0])) for name, combine in names.items()))


def decode_answer(payload: bytes, url: str) -> dict[str, Any]:
    try:
        answer = orjson.loads(payload)
        if not isinstance(answer["choices"][0], dict):
            raise TypeError("choices")
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        raise GenerationError(
            f"the server at {url} answered something that is no completion: {payload[:200]!r}"
        ) from None
    return answer


def error_text(payload: bytes) -> str:
    try:
        return str(orjson.loads(payload)["error"]["message"])[:500]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return payload[:500].decode(errors="replace")
