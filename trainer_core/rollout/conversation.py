"""From the turns of a rollout to the sequences that are trained on.

Each turn re-tokenises the conversation, so its prompt may differ from the tokens held so far. CLEAN: it begins with all of
them, and the rest is appended as context. REALIGN: it departs from them, but fewer than `fork_threshold` trained tokens
lie behind the departure: the prompt replaces that tail as context. FORK: more do; the held sequence is closed as it is and
a new one begins. Sampled ids are kept as sampled, and no token is trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trainer_core.rollout.types import Support, TurnRecord

Transition = Literal["clean", "realign", "fork"]


@dataclass
class TokenSequence:
    """One sequence: tokens, and for each the turn and position that sampled it, or None for context."""

    ids: list[int] = field(default_factory=list)
    sources: list[tuple[int, int] | None] = field(default_factory=list)

    def append_context(self, ids: Seq[int]) -> None:
        self.ids.extend(ids)
        self.sources.extend([None] * len(ids))

    def append_sampled(self, turn_index: int, ids: Seq[int]) -> None:
        self.ids.extend(ids)
        self.sources.extend((turn_index, position) for position in range(len(ids)))

    def trained_from(self, position: int) -> int:
        """Trained tokens at this position and behind it."""
        return sum(source is not None for source in self.sources[position:])

    def cut(self, position: int) -> None:
        del self.ids[position:]
        del self.sources[position:]


@dataclass
class Drift:
    """How a turn's prompt related to what was held. `tokens` counts held tokens that the prompt does not repeat."""

    transition: Transition
    tokens: int


@dataclass
class Reconciled:
    """`sequences` hold at least one trained token each; `drifts` has one entry for each turn but the first."""

    sequences: list[TokenSequence]
    drifts: list[Drift]


@dataclass
class TrainingArrays:
    """Arrays of length T for a sequence, as in `RolloutSample`; `top_*` are [T, K] or None."""

    input_ids: np.ndarray
    completion_mask: np.ndarray
    log_probs: np.ndarray
    top_ids: np.ndarray | None
    top_log_probs: np.ndarray | None
    support: Support | None


def reconcile(turns: Seq[TurnRecord], fork_threshold: int) -> Reconciled:
    """Merge turns into sequences. Raises ValueError when a turn's ids and log-probabilities do not match in number."""
    sequences: list[TokenSequence] = []
    drifts: list[Drift] = []
    held = TokenSequence()
    for index, turn in enumerate(turns):
        if len(turn.output_ids) != len(turn.output_log_probs):
            raise ValueError(
                f"turn {index} has {len(turn.output_ids)} output ids and {len(turn.output_log_probs)} log-probabilities"
            )
        common = _common_prefix(held.ids, turn.prompt_ids)
        drift = len(held.ids) - common
        lost = held.trained_from(common)
        transition: Transition = "clean" if not drift else ("realign" if lost < fork_threshold else "fork")
        if transition == "fork":
            sequences.append(held)
            held = TokenSequence()
            held.append_context(turn.prompt_ids)
        else:
            held.cut(common)
            held.append_context(turn.prompt_ids[common:])
        if index:
            drifts.append(Drift(transition, drift))
        held.append_sampled(index, turn.output_ids)
    sequences.append(held)
    return Reconciled([sequence for sequence in sequences if sequence.trained_from(0)], drifts)


def training_arrays(sequence: TokenSequence, turns: Seq[TurnRecord]) -> TrainingArrays:
    """The arrays of one sequence. K is the widest of the turns; padding is id 0 with log-probability -inf."""
    length = len(sequence.ids)
    mask = np.zeros(length, dtype=np.int8)
    log_probs = np.zeros(length, dtype=np.float32)
    width = max((turn.top_ids.shape[1] for turn in turns if turn.top_ids is not None), default=0)
    top_ids = np.zeros((length, width), dtype=np.int32) if width else None
    top_log_probs = np.full((length, width), -np.inf, dtype=np.float32) if width else None
    for start, stop, turn_index, offset in _runs(sequence.sources):
        turn = turns[turn_index]
        sampled = slice(offset, offset + stop - start)
        mask[start:stop] = 1
        log_probs[start:stop] = turn.output_log_probs[sampled]
        if top_ids is not None and top_log_probs is not None and turn.top_ids is not None:
            assert turn.top_log_probs is not None
            columns = turn.top_ids.shape[1]
            top_ids[start:stop, :columns] = turn.top_ids[sampled]
            top_log_probs[start:stop, :columns] = turn.top_log_probs[sampled]
    support = _support(sequence, turns) if any(turn.support is not None for turn in turns) else None
    return TrainingArrays(np.asarray(sequence.ids, dtype=np.int32), mask, log_probs, top_ids, top_log_probs, support)


def _support(sequence: TokenSequence, turns: Seq[TurnRecord]) -> Support:
    """The sampler's sets of the trained tokens; no set elsewhere."""
    counts = np.zeros(len(sequence.ids), dtype=np.int32)
    parts = [np.empty(0, dtype=np.int32)]
    for start, stop, turn_index, offset in _runs(sequence.sources):
        if (held := turns[turn_index].support) is not None:
            ends = np.cumsum(held.counts)
            sampled = slice(offset, offset + stop - start)
            counts[start:stop] = held.counts[sampled]
            parts.append(held.ids[ends[offset] - held.counts[offset] : ends[offset + stop - start - 1]])
    return Support(counts, np.concatenate(parts))


def _common_prefix(held: list[int], prompt: list[int]) -> int:
    length = min(len(held), len(prompt))
    if held[:length] == prompt[:length]:
        return length
    different = np.asarray(held[:length]) != np.asarray(prompt[:length])
    return int(different.argmax())


def _runs(sources: list[tuple[int, int] | None]) -> list[tuple[int, int, int, int]]:
    """(start, stop, turn, offset) of each stretch sampled in one turn."""
    runs: list[tuple[int, int, int, int]] = []
    start = 0
    while start < len(sources):
        source = sources[start]
        if source is None:
            start += 1
            continue
        stop = start + 1
        while stop < len(sources) and sources[stop] == (source[0], source[1] + stop - start):
            stop += 1
        runs.append((start, stop, *source))
        start = stop
    return runs
