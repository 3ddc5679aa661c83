"""The rollout side's data: group, rollout, turn, and the samples that cross to the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Message = dict[str, Any]
"""A chat message: {"role": ..., "content": ..., possibly "tool_calls": [...]}."""


@dataclass
class Support:
    """The tokens that top-k, top-p and min-p left the sampler, position by position: it normalised over these alone.

    `counts` has shape [T], `ids` [sum(counts)]: the sets one after another, each in no order, the sampled token among them.
    A count of 0 is a position without a set (context, or the whole vocabulary).
    """

    counts: np.ndarray
    ids: np.ndarray

    def padded(self, positions: np.ndarray) -> np.ndarray:
        """[len(positions), W] int32, W the largest set among these positions (at least 1); -1 pads.

        A row of nothing but -1 stands for the whole vocabulary.
        """
        counts = self.counts[positions]
        starts = (np.cumsum(self.counts) - self.counts)[positions]
        columns = np.arange(max(1, int(counts.max(initial=0))))
        inside = columns < counts[:, None]
        table = np.full(inside.shape, -1, dtype=np.int32)
        table[inside] = self.ids[(starts[:, None] + columns)[inside]]
        return table


@dataclass
class TurnRecord:
    """One call of the server.

    `top_ids` and `top_log_probs` have shape [len(output_ids), K]: the sampler's K most likely tokens at each position
    (K = 0 without score centering); -inf pads rows with fewer. `support` has a set for each output id; None where the sampler
    drew from the whole vocabulary, or the server cannot tell.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float]
    top_ids: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None
    finish_reason: str = "stop"
    weight_version: int = 0
    support: Support | None = None


@dataclass
class Rollout:
    """One whole conversation. `reward` may be set by a custom `generate_one` and is added to the reward functions'."""

    rollout_id: str
    prompt: list[Message]
    completion: list[Message]
    turns: list[TurnRecord]
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def completion_ids(self) -> list[int]:
        """Generated tokens of all turns."""
        return [token for turn in self.turns for token in turn.output_ids]

    @property
    def truncated(self) -> bool:
        """Whether the last turn ended at the token limit."""
        return bool(self.turns) and self.turns[-1].finish_reason == "length"


@dataclass
class RolloutGroup:
    """One prompt and its rollouts, scored against one another.

    `rewards` has shape [num_generations]: weighted sums, NaN where a rollout is unscorable. `weight_version` is that of
    the oldest rollout's start: staleness is counted for the group as a whole.
    """

    group_id: str
    row_index: int
    epoch: int
    row: dict[str, Any]
    rollouts: list[Rollout]
    weight_version: int
    rewards: np.ndarray = field(default_factory=lambda: np.empty(0))
    rewards_per_function: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class RolloutSample:
    """What crosses the process boundary: one sequence, ready to train on.

    Arrays have the length T of the sequence; position t holds what is known of token t. `completion_mask` is 1 where the
    token is trained, `log_probs` is the sampler's log-probability there (0 elsewhere). `top_ids`/`top_log_probs` are
    [T, K], rows of untrained tokens are padding (id 0, -inf). `support`, of T positions, is what the sampler normalised over,
    and None where that was the whole vocabulary or is unknown. `group_size` is the number of samples that cross for the group,
    so the trainer knows which one is its last.
    """

    group_id: str
    rollout_id: str
    row_index: int
    epoch: int
    weight_version: int
    input_ids: np.ndarray
    completion_mask: np.ndarray
    log_probs: np.ndarray
    advantage: float
    reward: float
    truncated: bool
    queued_at: float
    group_size: int
    top_ids: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None
    support: Support | None = None
    metrics: dict[str, float] = field(default_factory=dict)
