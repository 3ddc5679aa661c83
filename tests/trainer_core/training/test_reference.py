"""What the KL term compares with, where peft moves weights of the base into the adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from peft import LoraConfig

from tests.trainer_core.training.replay import make_group
from tests.trainer_core.training.test_trainer import spool_lines


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_reference_is_the_model_that_was_loaded(make_trainer: Callable[..., Any], init: Any) -> None:
    samples = [sample for row in range(4) for sample in make_group(row)]
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init)
    trainer = make_trainer(samples, peft_config=lora, beta=0.1)
    trainer.train()
    first, second = (line["values"]["ref_kl"] for line in spool_lines(trainer, "metrics"))
    assert first == pytest.approx(0, abs=1e-6)  # base and adapter together begin as it
    assert second > 1e-6


def test_an_adapter_of_random_weights_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="init_lora_weights is False: the adapter would begin with random weights"):
        make_trainer([], peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
