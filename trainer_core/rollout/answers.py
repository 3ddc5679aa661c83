"""Reading vLLM's answers: completions with their log-probabilities, metrics, errors. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson

from trainer_core.rollout.types import TurnRecord

CUT_OFF = -9000.0
"""vLLM reports tokens outside top-k/top-p with log-probability -9999."""
TOKEN_PREFIX = "token_id:"


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


def parse_choice(choice: dict[str, Any], prompt_ids: list[int], top: int, version: int) -> TurnRecord:
    """A TurnRecord from one choice of /v1/completions. Raises GenerationError when the answer is not what was asked."""
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if ids is None or logprobs is None or len(logprobs["token_logprobs"]) != len(ids):
        raise GenerationError(
            "the server's answer lacks token ids or their log-probabilities; vLLM 0.26 or newer is needed"
        )
    top_ids, top_log_probs = parse_top(logprobs["top_logprobs"], top) if top else (None, None)
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=ids,
        output_log_probs=logprobs["token_logprobs"],
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        finish_reason=choice["finish_reason"],
        weight_version=version,
    )


def parse_top(positions: list[dict[str, float]], top: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, K] ids and log-probabilities of the K most likely tokens; -inf pads.

    vLLM puts the sampled token first, and adds it when it is not among the top K: then a position has K + 1 entries.
    """
    counts = np.fromiter(map(len, positions), dtype=np.intp, count=len(positions))
    total = int(counts.sum())
    # One long text of numbers is read much faster than tens of thousands of short ones.
    text = ",".join(chain.from_iterable(positions)).replace(TOKEN_PREFIX, "")
    tokens = np.fromstring(text, dtype=np.int64, sep=",") if total else np.empty(0, dtype=np.int64)
    if len(tokens) != total:
        raise GenerationError("the server's log-probabilities are not named by token ids; vLLM 0.26 or newer is needed")
    values = np.fromiter(chain.from_iterable(map(dict.values, positions)), dtype=np.float32, count=total)
    rows = np.repeat(np.arange(len(positions)), counts)
    # Place of each entry in its row; an additional first one falls out at -1.
    columns = np.arange(total) - np.repeat(np.cumsum(counts) - counts + (counts > top), counts)
    kept = (columns >= 0) & (values >= CUT_OFF)
    ids = np.zeros((len(positions), top), dtype=np.int32)
    log_probs = np.full((len(positions), top), -np.inf, dtype=np.float32)
    ids[rows[kept], columns[kept]] = tokens[kept]
    log_probs[rows[kept], columns[kept]] = values[kept]
    return ids, log_probs


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
        if not answer["choices"]:
            raise KeyError("choices")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise GenerationError(
            f"the server at {url} answered something that is no completion: {payload[:200]!r}"
        ) from None
    return answer


def error_text(payload: bytes) -> str:
    try:
        return str(orjson.loads(payload)["error"]["message"])[:500]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return payload[:500].decode(errors="replace")
