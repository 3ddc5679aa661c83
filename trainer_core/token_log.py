"""What an optimizer step did with the tokens of its rollouts, one by one, for the rollout viewer.

The rollout worker stores a rollout when it is scored; what the trainer thinks of its tokens is known only when they are
trained on. A step writes one line for each of its groups: when it was trained and how stale it was, and for some rollouts,
up to TOKENS_A_STEP tokens, what each token's ratio and entropy were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainer_core.loss import LossInputs, LossSettings, in_bounds
from trainer_core.rollout.types import RolloutSample

TOKENS_A_STEP = 4096
"""Tokens of a step whose values are stored: some 100 kB of JSON."""


def choose(samples: Sequence[RolloutSample], limit: int = TOKENS_A_STEP) -> frozenset[int]:
    """Indices of the samples whose tokens are stored: group after group, as many as have `limit` tokens together.

    At least one is chosen, however long it is.
    """
    by_group: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_group[sample.group_id].append(index)
    chosen: list[int] = []
    left = limit
    for index in (index for members in by_group.values() for index in members):
        left -= len(samples[index].input_ids) - first_trained(samples[index])
        if left < 0 and chosen:
            break
        chosen.append(index)
    return frozenset(chosen)


def first_trained(sample: RolloutSample) -> int:
    return int(np.argmax(sample.completion_mask != 0))


class TokenTexts:
    """Token ids as the text they stand for. A character that is spread over several tokens belongs to the first of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        texts = [self._text(token) for token in ids]
        start = 0
        while start < len(texts):
            stop = start
            while stop < len(texts) and "\ufffd" in texts[stop]:
                stop += 1
            if stop > start:
                texts[start:stop] = [self._decode(ids[start:stop]), *[""] * (stop - start - 1)]
            start = stop + 1
        return texts

    def _text(self, token: int) -> str:
        if token not in self._known:
            text = self._decode([token])
            # A SentencePiece decoder drops the space in front of what it takes for the beginning of a text.
            if str(self._tokenizer.convert_ids_to_tokens(token)).startswith("\u2581") and not text.startswith(" "):
                text = f" {text}"
            self._known[token] = text
        return self._known[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class TokenLog:
    """Values of the running step's chosen samples, by their index among the step's samples."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._values: dict[int, np.ndarray] = {}
        self._rows: list[tuple[int, list[int], torch.Tensor]] = []

    def add(self, first: int, terms: LossInputs, settings: LossSettings, chosen: frozenset[int]) -> None:
        """Keep what is known of a row, whose samples are `first`, `first` + 1 and so on; on its device until `take`."""
        wanted = [index for index in range(first, first + len(terms.advantages)) if index in chosen]
        if not wanted:
            return
        log_probs = terms.log_probs.detach()
        ratio = (log_probs - terms.old_log_probs).exp()
        columns = [terms.old_log_probs, ratio, terms.entropy, in_bounds(ratio, settings), terms.sample_index]
        self._rows.append((first, wanted, torch.stack([column.float() for column in columns])))

    def take(self) -> dict[int, np.ndarray]:
        """This rank's values since the last call; one transfer from the device a row."""
        rows, self._rows = self._rows, []
        for first, wanted, table in rows:
            found = table.cpu().numpy()
            for index in wanted:
                self._values[index] = found[:4, found[4] == index - first]
        values, self._values = self._values, {}
        return values

    def add_ranks(self, taken: Sequence[dict[int, np.ndarray]]) -> None:
        """Take up what `take` gave on all ranks."""
        for values in taken:
            self._values |= values

    def lines(self, samples: Sequence[RolloutSample], version: int, limit: int = TOKENS_A_STEP) -> list[dict[str, Any]]:
        """One record for each group of the step, as trainer_core/spool.py describes them; forgets the step's values."""
        values, self._values = self._values, {}
        groups: dict[str, dict[str, Any]] = {}
        sequences: dict[str, int] = defaultdict(int)
        for index, sample in enumerate(samples):
            group = groups.setdefault(sample.group_id, {
                "group_id": sample.group_id, "staleness": version - sample.weight_version, "rollouts": [],
            })  # fmt: skip
            sequence = sequences[sample.rollout_id]
            sequences[sample.rollout_id] += 1
            if index in values:
                group["rollouts"].append(self._record(sample, sequence, values[index], limit))
        return list(groups.values())

    def _record(self, sample: RolloutSample, sequence: int, values: np.ndarray, limit: int) -> dict[str, Any]:
        first = first_trained(sample)
        last = min(len(sample.input_ids), first + limit)
        trained = sample.completion_mask[first:last] != 0
        old, ratio, entropy, kept = values[:, : int(trained.sum())]
        marks = np.full(last - first, ".")
        marks[trained] = np.where(kept != 0, "t", "o")
        return {
            "rollout_id": sample.rollout_id, "sequence": sequence, "advantage": sample.advantage,
            "left_out": len(sample.input_ids) - last, "text": self._texts(sample.input_ids[first:last].tolist()),
            "mask": "".join(marks), "log_probs": _short(old, 3), "ratio": _short(ratio, 4), "entropy": _short(entropy, 3),
        }  # fmt: skip


def _short(values: np.ndarray, digits: int) -> list[float]:
    return [round(value, digits) for value in values.astype(np.float64).tolist()]
