"""Rollouts beyond the seeded ones: tokens with values, tool calls, very long texts, prompts that come up again."""

from __future__ import annotations

import random
import re
from typing import Any

import orjson
from django.utils import timezone

from webapp.rollouts.models import StoredRollout
from webapp.rollouts.store import ship_rollouts
from webapp.runs.models import Attempt, Run


def ship(attempt: Attempt, lines: list[dict[str, Any]]) -> None:
    attempt.refresh_from_db()
    ship_rollouts(attempt, attempt.rollouts_offset, b"".join(orjson.dumps(line) + b"\n" for line in lines))


def line(kind: str, step: int, record: dict[str, Any]) -> dict[str, Any]:
    return {"v": 1, "kind": kind, "t": timezone.now().timestamp(), "step": step, kind: record}


def newest_attempt(run: Run) -> Attempt:
    attempt = run.current_attempt
    assert attempt is not None
    return attempt


def add_tokens(run: Run, step: int) -> None:
    """What a trainer says of the tokens of all groups of a step."""
    rng = random.Random(1)
    by_group: dict[str, list[dict[str, Any]]] = {}
    for rollout in StoredRollout.objects.filter(run=run, step=step):
        said = rollout.data["completion"][-1]["content"]
        text = re.findall(r"\s*\w+|\s*[^\w\s]+", said)
        marks = [rng.choice("tttttttto") for _ in text]
        by_group.setdefault(rollout.group_id, []).append({
            "rollout_id": rollout.rollout_id, "sequence": 0, "advantage": rollout.data["advantage"], "left_out": 0,
            "text": [*text, "<|im_end|>", "\nuser"], "mask": "".join(marks) + "t.",
            "log_probs": [round(-rng.expovariate(2), 3) for _ in range(len(text) + 1)],
            "ratio": [round(rng.lognormvariate(0, 0.25), 4) for _ in range(len(text) + 1)],
            "entropy": [round(rng.expovariate(1.5), 3) for _ in range(len(text) + 1)],
        })  # fmt: skip
    ship(newest_attempt(run), [
        line("trained", step + 2, {"group_id": group_id, "staleness": 1, "rollouts": rollouts})
        for group_id, rollouts in by_group.items()
    ])  # fmt: skip


def rollout(group_id: str, row_index: int, index: int, completion: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "group_id": group_id, "rollout_id": f"{group_id}-{index}", "row_index": row_index, "epoch": 1, "version": 0,
        "prompt": [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "How warm is it in Kraków?"}],
        "completion": completion, "tokens": 80, "turns": 2, "finish_reason": "stop", "rewards": {"judge": 1.0 * index},
        "reward": 1.0 * index, "advantage": index - 0.5, "duration_s": 1.5, "dropped": None, **more,
    }  # fmt: skip


TOOL_TALK = [
    {"role": "assistant", "content": "I look it up.", "tool_calls": [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Kraków", "unit": "C"}}},
    ]},
    {"role": "tool", "name": "get_weather", "content": "{\"degrees\": 21}"},
    {"role": "assistant", "content": "It is 21 °C in Kraków."},
]  # fmt: skip


def add_conversation(run: Run, step: int, group_id: str = "talk", row_index: int = 900, long: int = 0) -> None:
    """A group of two: one rollout that called a tool, one that talked on for `long` characters."""
    endless = [
        {"role": "assistant", "content": ("Let me think about it again. " * (long // 29 + 1))[:long] or "No idea."}
    ]
    lines = [rollout(group_id, row_index, 1, TOOL_TALK), rollout(group_id, row_index, 0, endless)]
    ship(newest_attempt(run), [line("rollout", step, item) for item in lines])
