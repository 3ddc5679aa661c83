"""The built-in reward functions.

Each is called with the prompts and completions of a group and the dataset's columns as lists of the same length, and returns
a reward for each completion, or None where it cannot tell. A completion is a list of messages for chat prompts, text
otherwise. Heavy libraries are imported where they are used, so that a list of the built-ins costs nothing.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Completion = str | list[dict[str, Any]]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_THINK = re.compile(r"\s*<think>(?!.*<think>)(.*?)</think>(.*)", re.DOTALL)


def completion_text(completion: Completion) -> str:
    """The text of a completion: that of its last assistant message."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return message.get("content") or ""
    return ""


def exact_match(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the completion, without white space around it, is the answer."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion_text(completion).strip() == str(gold).strip()) for completion, gold in pairs]


def last_number_match(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the last number of the completion equals the answer; None where the answer is no number."""
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        try:
            expected = float(str(gold).replace(",", ""))
        except ValueError:
            rewards.append(None)
            continue
        found = _NUMBER.findall(completion_text(completion).replace(",", ""))
        rewards.append(float(bool(found) and math.isclose(float(found[-1]), expected, rel_tol=1e-9, abs_tol=1e-9)))
    return rewards


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str] | None = None, **columns: Any
) -> list[float | None]:
    """1 where math-verify finds the completion equal to the `solution` or `answer` column; None where that is unreadable."""
    from math_verify import parse, verify

    golds = solution if solution is not None else columns.get("answer")
    if golds is None:
        raise KeyError("accuracy_reward needs a 'solution' or an 'answer' column")
    rewards: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        expected = parse(str(gold)) or parse(f"${gold}$")
        if not expected:
            rewards.append(None)
            continue
        rewards.append(float(verify(expected, parse(completion_text(completion)))))
    return rewards


def think_format_reward(completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 where the completion is one <think>...</think> block followed by an answer."""
    rewards: list[float | None] = []
    for completion in completions:
        match = _THINK.fullmatch(completion_text(completion))
        well_formed = match is not None and match[2].strip() != "" and "think>" not in match[2]
        rewards.append(float(well_formed))
    return rewards


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """0 up to `max_completion_length - soft_length` tokens, falling to -1 at `max_completion_length` and beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).
    """

    max_completion_length: int = 2048
    soft_length: int = 512
    __name__ = "soft_overlong_punishment"

    def __post_init__(self) -> None:
        if not 0 < self.soft_length <= self.max_completion_length:
            raise ValueError(
                f"soft_length is {self.soft_length}; it must be above 0 and at most max_completion_length "
                f"({self.max_completion_length})"
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        free = self.max_completion_length - self.soft_length
        return [max(-1.0, min(0.0, (free - len(ids)) / self.soft_length)) for ids in completion_ids]


soft_overlong_punishment = SoftOverlongPunishment()


@lru_cache(maxsize=32)
def _scorer(task: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def reasoning_gym_score(
    completions: Sequence[Completion],
    reasoning_gym_task: Sequence[str],
    reasoning_gym_entry: Sequence[str],
    **columns: Any,
) -> list[float | None]:
    """reasoning-gym's own score of the answer, with partial credit where the task gives it.

    The answer is what an <answer> tag holds; else the last number, where the expected answer is a number; else all of it.
    """
    rewards: list[float | None] = []
    for completion, task, entry in zip(completions, reasoning_gym_task, reasoning_gym_entry, strict=True):
        expected = json.loads(entry)
        answer = _extract_answer(completion_text(completion), str(expected.get("answer", "")))
        rewards.append(float(_scorer(task)(answer, expected)))
    return rewards


def _extract_answer(text: str, expected: str) -> str:
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return tagged[-1].strip()
    if _NUMBER.fullmatch(expected.strip()) and (numbers := _NUMBER.findall(text)):
        return numbers[-1]
    return text.strip()


@dataclass(frozen=True)
class HttpReward:
    """Scores from a served model: POSTs the group as JSON and reads {"rewards": [number or null, ...]}.

    The body is {"prompts": [...], "completions": [...], "columns": {...}}. With no `url` given, the rows' `reward_url`
    column says where. An answer other than 200 or a broken connection raises.
    """

    url: str = ""
    timeout_s: float = 30.0
    __name__ = "http_reward"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        urls = {self.url} if self.url else set(columns.get("reward_url") or [])
        if len(urls) != 1:
            raise ValueError(
                f"http_reward found {len(urls)} addresses; give one url, or one reward_url column value a row"
            )
        url = urls.pop()
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"http_reward has the address {url!r}; it must begin with http:// or https://")
        sent = {name: values for name, values in columns.items() if name not in ("reward_url", "completion_ids")}
        body = json.dumps({"prompts": list(prompts), "completions": list(completions), "columns": sent}).encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the reward server at {url} answered with HTTP {error.code}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), list):
            raise ValueError(f'the reward server at {url} answered without a list "rewards"')
        return answer["rewards"]


http_reward = HttpReward()
