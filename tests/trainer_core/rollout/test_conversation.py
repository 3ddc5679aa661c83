"""Reconciliation against what must hold for any turns: sampled ids keep their context, none is trained twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_core.rollout.conversation import reconcile, training_arrays
from trainer_core.rollout.types import Support, TurnRecord


def turn(prompt: list[int], output: list[int], log_probs: list[float] | None = None, top: int = 0) -> TurnRecord:
    record = TurnRecord(prompt, output, log_probs or [-0.1 * (i + 1) for i in range(len(output))])
    if top:
        record.top_ids = np.arange(len(output) * top).reshape(len(output), top)
        record.top_log_probs = -np.ones((len(output), top), dtype=np.float32)
    return record


def test_one_turn() -> None:
    result = reconcile([turn([1, 2], [3, 4], [-0.5, -0.25], top=2)], 10)
    arrays = training_arrays(result.sequences[0], [turn([1, 2], [3, 4], [-0.5, -0.25], top=2)])
    assert arrays.input_ids.tolist() == [1, 2, 3, 4]
    assert arrays.completion_mask.tolist() == [0, 0, 1, 1]
    assert arrays.log_probs.tolist() == [0, 0, -0.5, -0.25]
    assert arrays.top_ids is not None
    assert arrays.top_ids.tolist() == [[0, 0], [0, 0], [0, 1], [2, 3]]
    assert arrays.top_log_probs is not None
    assert np.isneginf(arrays.top_log_probs[:2]).all()
    assert result.drifts == []


def test_clean_realign_and_fork() -> None:
    first = turn([1, 2], [3, 4, 5])
    clean = reconcile([first, turn([1, 2, 3, 4, 5, 9], [6])], 3)
    assert [d.transition for d in clean.drifts] == ["clean"]
    assert clean.sequences[0].ids == [1, 2, 3, 4, 5, 9, 6]
    realigned = reconcile([first, turn([1, 2, 3, 7, 8, 9], [6])], 3)
    assert [(d.transition, d.tokens) for d in realigned.drifts] == [("realign", 2)]
    assert realigned.sequences[0].ids == [1, 2, 3, 7, 8, 9, 6]
    assert training_arrays(realigned.sequences[0], [first, turn([], [6])]).completion_mask.tolist() == [
        0,
        0,
        1,
        0,
        0,
        0,
        1,
    ]
    forked = reconcile([first, turn([1, 2, 3, 7, 8, 9], [6])], 2)
    assert [d.transition for d in forked.drifts] == ["fork"]
    assert [s.ids for s in forked.sequences] == [[1, 2, 3, 4, 5], [1, 2, 3, 7, 8, 9, 6]]
    assert [s.trained_from(0) for s in forked.sequences] == [3, 1]


def test_a_prompt_that_ends_early_drifts_too() -> None:
    result = reconcile([turn([1], [2, 3]), turn([1, 2], [4])], 5)
    assert [(d.transition, d.tokens) for d in result.drifts] == [("realign", 1)]
    assert result.sequences[0].ids == [1, 2, 4]


def test_sequences_without_trained_tokens_are_left_out() -> None:
    assert reconcile([turn([1], [])], 5).sequences == []
    assert reconcile([], 5).sequences == []


def test_ids_without_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="turn 0 has 2 output ids and 1 log-probabilities"):
        reconcile([TurnRecord([1], [2, 3], [-1.0])], 5)


tokens = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(tokens, st.booleans(), tokens, tokens), min_size=1, max_size=5), st.integers(0, 6))
def test_any_turns(shapes: list[tuple[list[int], bool, list[int], list[int]]], threshold: int) -> None:
    """Prompts repeat a part of the conversation so far and go on with something else, or are unrelated."""
    turns: list[TurnRecord] = []
    conversation: list[int] = []
    for index, (kept, related, tail, output) in enumerate(shapes):
        prompt = conversation[: max(0, len(conversation) - len(kept))] + tail if related else tail
        log_probs = [-(index + 1) - 0.01 * position for position in range(len(output))]
        turns.append(turn(prompt, output, log_probs))
        conversation = prompt + output
    result = reconcile(turns, threshold)

    seen: set[tuple[int, int]] = set()
    for sequence in result.sequences:
        arrays = training_arrays(sequence, turns)
        assert arrays.completion_mask.sum() > 0
        for position in np.flatnonzero(arrays.completion_mask):
            source = sequence.sources[position]
            assert source is not None
            assert source not in seen, "a token is trained twice"
            seen.add(source)
            index, offset = source
            # what the model saw when it sampled this token, and what it sampled
            context = turns[index].prompt_ids + turns[index].output_ids[: offset + 1]
            assert sequence.ids[: position + 1] == context
            assert arrays.log_probs[position] == pytest.approx(turns[index].output_log_probs[offset])
        assert (arrays.log_probs[arrays.completion_mask == 0] == 0).all()

    # every sampled token is trained, except where a realignment gave fewer than `threshold` of them up
    assert len(result.drifts) == len(turns) - 1
    given_up = sum(len(t.output_ids) for t in turns) - len(seen)
    realigned = sum(d.transition == "realign" for d in result.drifts)
    assert given_up <= max(0, threshold - 1) * realigned
    assert (threshold == 0) <= (realigned == 0)


def test_support_goes_where_its_tokens_go() -> None:
    """Sets of any size, one turn without them, a realignment that turns sampled tokens into context."""
    first = Support(np.array([2, 1, 3], np.int32), np.array([5, 6, 7, 8, 9, 10], np.int32))
    last = Support(np.array([1, 2], np.int32), np.array([20, 21, 22], np.int32))
    turns = [
        TurnRecord([1, 2], [5, 7, 8], [-1.0] * 3, support=first),
        TurnRecord([1, 2, 5, 7, 99, 3], [4], [-1.0]),
        TurnRecord([1, 2, 5, 7, 99, 3, 4, 30], [20, 21], [-1.0] * 2, support=last),
    ]
    (sequence,) = reconcile(turns, fork_threshold=8).sequences
    arrays = training_arrays(sequence, turns)
    assert arrays.support is not None
    assert arrays.support.counts.tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 1, 2]
    trained = np.flatnonzero(arrays.completion_mask)
    assert arrays.input_ids[trained].tolist() == [5, 7, 4, 20, 21]
    assert arrays.support.padded(trained).tolist() == [[5, 6], [7, -1], [-1, -1], [20, -1], [21, 22]]
    assert arrays.support.padded(np.array([0, 1])).tolist() == [[-1], [-1]]
    assert training_arrays(sequence, [turns[1]] * 3).support is None
