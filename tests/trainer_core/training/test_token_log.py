"""What a step tells the rollout viewer about single tokens, against the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer_core.training.replay import ReplayWorker, make_group
from trainer_core import token_log
from trainer_core.spool import ROLLOUTS_FILE
from trainer_core.token_log import TokenTexts, choose

MakeTrainer = Callable[..., Any]


def lines_of(trainer: Any) -> list[dict[str, Any]]:
    text = (Path(trainer.args.output_dir) / ROLLOUTS_FILE).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_tokens_come_with_the_ratio_and_entropy_that_the_model_gives_them(
    make_trainer: MakeTrainer, tiny_llama: Path
) -> None:
    samples = [sample for row in range(4) for sample in make_group(row)]
    samples[0].completion_mask[-1] = 0  # something a tool said, behind what was trained
    trainer = make_trainer(samples, max_steps=2)
    trainer.train()
    lines = lines_of(trainer)
    assert [(line["kind"], line["step"], line["trained"]["group_id"]) for line in lines] == [
        ("trained", 1, "0-0"), ("trained", 1, "0-1"), ("trained", 2, "0-2"), ("trained", 2, "0-3"),
    ]  # fmt: skip
    assert [len(line["trained"]["rollouts"]) for line in lines] == [4] * 4
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    records = {item["rollout_id"]: item for line in lines for item in line["trained"]["rollouts"]}
    for sample in samples[:8]:  # the first step's, whose weights are those on disk
        record = records[sample.rollout_id]
        ids = torch.from_numpy(sample.input_ids)[None]
        with torch.no_grad():
            log_probs = model(ids).logits[0].float().log_softmax(-1)
        places = np.flatnonzero(sample.completion_mask)
        own = log_probs[places - 1, sample.input_ids[places]].numpy()
        assert record["ratio"] == pytest.approx(np.exp(own - sample.log_probs[places]), rel=2e-3, abs=2e-4)
        assert record["log_probs"] == pytest.approx(sample.log_probs[places], abs=6e-4)
        entropy = -(log_probs.exp() * log_probs).sum(-1)[places - 1].numpy()
        assert record["entropy"] == pytest.approx(entropy, abs=2e-3)
        assert record["text"] == [f"w{token}" for token in sample.input_ids[places[0] :]]
        bounds = [
            "t" if trainer.args.vllm_importance_sampling_clip_min <= ratio <= 5 else "o" for ratio in record["ratio"]
        ]
        context = ["."] if sample is samples[0] else []
        assert list(record["mask"]) == bounds + context
    assert {mark for record in records.values() for mark in record["mask"]} == {"t", "o", "."}


def test_staleness_is_that_of_the_group_when_it_was_trained(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplayWorker, "current_version", False)
    trainer = make_trainer([sample for row in range(4) for sample in make_group(row)], max_steps=2, max_staleness=3)
    trainer.train()
    assert [line["trained"]["staleness"] for line in lines_of(trainer)] == [0, 0, 1, 1]


def test_few_tokens_are_chosen_in_whole_groups_and_a_long_one_is_cut() -> None:
    samples = [sample for row in range(3) for sample in make_group(row)]
    lengths = [int(sample.completion_mask.sum()) for sample in samples]
    chosen = choose(samples, sum(lengths[:5]))
    assert chosen == {0, 1, 2, 3, 4}
    assert choose(samples, 1) == {0}
    assert choose([], 5) == frozenset()
    log = token_log.TokenLog(TokenTexts(_Bytes()))
    log._values = {0: np.ones((4, lengths[0]))}
    (record,) = log.lines(samples[:1], version=7, limit=1)[0]["rollouts"]
    assert (len(record["text"]), len(record["mask"]), len(record["ratio"])) == (1, 1, 1)
    assert record["left_out"] == lengths[0] - 1


def test_rollouts_of_several_sequences_keep_them_apart() -> None:
    one, two = make_group(0, size=2)
    two.rollout_id = one.rollout_id
    log = token_log.TokenLog(TokenTexts(_Bytes()))
    log._values = {index: np.ones((4, int(sample.completion_mask.sum()))) for index, sample in enumerate([one, two])}
    (group,) = log.lines([one, two], version=0)
    assert [(item["rollout_id"], item["sequence"]) for item in group["rollouts"]] == [("0-0-0", 0), ("0-0-0", 1)]


class _Bytes:
    """A tokenizer of single bytes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def test_a_character_of_several_tokens_is_one_text() -> None:
    data = "aé€!🎉".encode()
    texts = TokenTexts(_Bytes())(list(data))
    assert texts == ["a", "é€", "", "", "", "", "!", "🎉", "", "", ""]
    assert "".join(texts) == "aé€!🎉"
    assert TokenTexts(_Bytes())([0xE2, 0x82]) == ["�", ""]  # half a character stays visible


def test_texts_of_a_real_tokenizer_make_up_what_was_said(tiny_llama: Path) -> None:
    texts = TokenTexts(AutoTokenizer.from_pretrained(tiny_llama))
    assert texts([3, 4]) == ["w3", "w4"]
