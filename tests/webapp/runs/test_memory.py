"""The memory estimate: against sums done by hand, against peaks measured on a GPU, and against a step measured here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_core.spec import LoraSpec, ModelSpec, RolloutSpec, RunSpec, ServerSpec, TrainingSpec
from webapp.runs import memory
from webapp.runs.memory import GIB, Row
from webapp.runs.sample import computes_in_bf16

ROOT = Path(__file__).resolve().parents[3]
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
SIX_LAYERS = {**SMOLLM2, "num_hidden_layers": 6}
QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
QWEN3_1_7B = {
    **QWEN3, "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16
}  # fmt: skip
QWEN3_4B = {
    **QWEN3, "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32
}  # fmt: skip


def shape(config: dict[str, Any]) -> memory.Shape:
    found = memory.shape_of(config)
    assert found is not None
    return found


def spec(
    dtype: str = "float32", *, lora: bool = False, saving: bool = True, bf16: bool = True, **others: Any
) -> RunSpec:
    return RunSpec(
        model=ModelSpec(dtype=dtype),  # type: ignore[arg-type]
        lora=LoraSpec(enabled=lora),
        training=TrainingSpec(gradient_checkpointing=saving, bf16=bf16, **others),
    )


def test_a_reference_model_is_held_beside_the_trained_one_but_not_beside_an_adapter() -> None:
    def weights(**changes: Any) -> int:
        return memory.trainer(spec(**changes), shape(SMOLLM2), Row(100, 100), "cpu").parts["weights"]

    assert weights(beta=0.1) == 2 * weights() == 2 * 4 * shape(SMOLLM2).parameters
    assert weights(beta=0.1, lora=True) == weights(lora=True)


@pytest.mark.parametrize(
    "config, parameters", [(SMOLLM2, 134_515_008), (QWEN3_1_7B, 1_720_574_976), (QWEN3_4B, 4_022_468_096)]
)
def test_parameters_are_those_that_the_models_cards_name(config: dict[str, Any], parameters: int) -> None:
    assert shape(config).parameters == parameters


def test_an_unknown_architecture_is_not_guessed_at() -> None:
    assert memory.shape_of({**SMOLLM2, "model_type": "mamba"}) is None
    assert memory.shape_of({"model_type": "llama"}) is None
    assert memory.shape_of({**SMOLLM2, "hidden_size": "wide"}) is None


def test_weights_gradients_and_moments_of_full_training_are_four_times_the_weights() -> None:
    need = memory.trainer(spec(), shape(SMOLLM2), Row(100, 50), "cpu")
    weights = 4 * 134_515_008
    assert need.parts["weights"] == need.parts["gradients"] == weights
    assert need.parts["optimizer"] == 2 * weights
    assert need.parts["activations"] == 100 * 30 * 576 * 4  # inputs of the layers, float32
    assert need.total == sum(need.parts.values())


def test_ranks_share_weights_gradients_and_moments() -> None:
    alone, shared = (memory.trainer(spec(), shape(QWEN3_4B), Row(4096, 4096), "cuda", ranks=ranks) for ranks in (1, 4))
    for part in ("weights", "gradients", "optimizer"):
        assert shared.parts[part] == alone.parts[part] // 4
    assert shared.parts["activations"] == alone.parts["activations"]  # each rank has a row of its own
    assert shared.total < alone.total / 2


def test_an_adapter_counts_in_and_out_of_each_matrix_times_its_rank() -> None:
    # r (in + out) of q, k, v, o, gate, up, down of SmolLM2: 576+576, 576+192 twice, 576+576, 576+1536 three times
    each_layer = 16 * (1152 + 768 + 768 + 1152 + 3 * 2112)
    need = memory.trainer(spec(lora=True), shape(SMOLLM2), Row(100, 50), "cpu")
    assert need.parts["gradients"] == 30 * each_layer * 4
    assert need.parts["optimizer"] == 2 * need.parts["gradients"]
    assert need.parts["weights"] == 4 * 134_515_008 + need.parts["gradients"]
    assert shape(SMOLLM2).adapter(16, "q_proj, o_proj") == 30 * 16 * (1152 + 1152)


def test_logits_are_bounded_by_a_chunk_however_many_positions_are_scored() -> None:
    few, many, more = (
        memory.trainer(spec(bf16=False, lora=True), shape(SMOLLM2), Row(10_000, scored), "cpu").parts["working"]
        for scored in (50, 1_000, 100_000)
    )
    assert many == more
    # 64 MiB of float32 logits of 49,152 tokens are 341 positions; 16 bytes each: logits, z, log p, p
    chunk = 341 * 49_152 * 16
    assert more >= chunk
    assert few <= many


def test_a_row_is_the_budget_or_the_longest_fixed_batch() -> None:
    assert memory.largest_row(spec(token_budget=8192), 60) == Row(8192, 8192)
    assert memory.largest_row(spec(token_budget=None), 60) == Row(4096, 4096)
    fixed = RunSpec(rollout=RolloutSpec(num_generations=8, max_completion_length=100),
                    training=TrainingSpec(per_device_train_batch_size=16))  # fmt: skip
    assert memory.largest_row(fixed, 60) == Row(2 * 60 + 16 * 100, 1600)


def test_the_server_keeps_weights_and_a_cache() -> None:
    sizes = shape(QWEN3_1_7B)
    assert memory.kv_bytes_a_token(RunSpec(), sizes) == 2 * 28 * 8 * 128 * 2  # keys and values, 28 layers, bfloat16
    whole = memory.server(RunSpec(), sizes, "cuda", 80 * GIB)
    assert whole.parts["weights"] == 2 * 1_720_574_976
    assert whole.total == pytest.approx(0.9 * 80 * GIB, abs=1)
    fixed = RunSpec(server=ServerSpec(kv_cache_gib=2.5))
    assert memory.server(fixed, sizes, "cuda", 80 * GIB).parts["cache"] == 2.5 * GIB
    assert memory.server(RunSpec(), sizes, "cpu").parts["cache"] == GIB
    unknown = memory.server(RunSpec(), sizes, "cuda", None)
    assert unknown.parts["cache"] == 4096 * memory.kv_bytes_a_token(RunSpec(), sizes)


@pytest.mark.parametrize(
    "config, dtype, saving, row, measured",
    [
        (QWEN3_1_7B, "float32", False, Row(15_358, 10_240), 63.1),
        (QWEN3_1_7B, "float32", False, Row(15_995, 3_200), 64.2),
        (QWEN3_4B, "bfloat16", False, Row(15_358, 10_240), 90.2),
        (QWEN3_4B, "bfloat16", False, Row(15_995, 3_200), 92.5),
        (QWEN3_1_7B, "float32", True, Row(16_004, 10_240), 34.6),
        (QWEN3_1_7B, "float32", True, Row(13_332, 3_200), 33.9),
    ],
)
def test_peaks_measured_on_an_h200_are_met(
    config: dict[str, Any], dtype: str, saving: bool, row: Row, measured: float
) -> None:
    """Numbers of docs/performance.md, peak GiB of bench/train_step.py; its layers are compiled."""
    need = memory.trainer(spec(dtype, saving=saving), shape(config), row, "cuda", compiled=True)
    assert need.total / GIB == pytest.approx(measured, rel=0.05)


MEASURE = """
import json, sys
sys.path.insert(0, "bench")
import torch
from train_step import Tree, make_rows, samples, step
from transformers import AutoConfig, AutoModelForCausalLM
import peft
from trainer_core.attention.interface import IMPLEMENTATION
from trainer_core.model import install_scoring
import trainer_core.trainer

def peak():
    # Not ru_maxrss: a process inherits that of the one that started it.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

config = json.loads(sys.argv[1])
config = AutoConfig.for_model(**config, max_position_embeddings=4096, attn_implementation=IMPLEMENTATION)
before = peak()
with torch.device("meta"):  # drawing random weights takes a minute
    model = AutoModelForCausalLM.from_config(config).train()
model.to_empty(device="cpu")
model.tie_weights()
with torch.no_grad():
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(0.01)
install_scoring(model)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
items = samples(Tree(8, 102, 25), 2, 1.0, config.vocab_size)
rows = make_rows(items, 8, share=True)
for _ in range(2):
    step(model, optimizer, rows, torch.device("cpu"), autocast=sys.argv[2] == "bfloat16")
print(json.dumps({"bytes": peak() - before, "before": before, "tokens": rows[0].tokens, "terms": rows[0].terms,
                  "parameters": sum(weight.numel() for weight in model.parameters())}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_peak_of_a_real_step_on_a_cpu_is_met() -> None:
    """Two optimizer steps of six layers of SmolLM2, two rows each, in a process of its own: what it grew by.

    In bfloat16 where the processor multiplies in it; any other takes minutes for that.
    """
    bf16 = computes_in_bf16()
    computed = "bfloat16" if bf16 else "float32"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(SIX_LAYERS), computed], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}, timeout=850,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["parameters"] == shape(SIX_LAYERS).parameters
    row = Row(measured["tokens"], measured["terms"])
    need = memory.trainer(spec(bf16=bf16), shape(SIX_LAYERS), row, "cpu")
    assert need.total == pytest.approx(measured["bytes"], rel=0.15), need.parts
    assert measured["before"] == pytest.approx(memory.PROCESS_BYTES["trainer"], rel=0.4)
