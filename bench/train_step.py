"""A whole training step on a GPU, packed against unpacked: time, MFU and peak memory of Qwen3-shaped models.

    python bench/train_step.py [--sizes 1.7B 4B] [--trees 8,2560,640 4,3500,250] [--trained 1.0 0.25] [--plain] [--profile FILE]

Both sides run the same code on the same samples: forward, loss and backward over all rows, then the optimizer. Packed rows hold
whole groups, unpacked rows whole samples, each up to 16k tokens. The trees have a packing ratio of 3.3; how far FLOPs fall
differs, because packing shares neither a branch's attention to its prompt nor the output layer's work for trained tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer_core.attention.backends import choose_backend
from trainer_core.attention.interface import IMPLEMENTATION
from trainer_core.compiled import compile_layers
from trainer_core.flops import FlopCounter, peak_flops
from trainer_core.loss import LossSettings, StepTotals, policy_loss
from trainer_core.model import install_scoring
from trainer_core.packing.collator import PackedRow, collate
from trainer_core.packing.planner import PackItem, RowPlan
from trainer_core.report import scored_positions
from trainer_core.rollout.types import RolloutSample
from trainer_core.row_loss import loss_inputs

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32},
}
VOCABULARY, NUM_TOP = 151_936, 8
ROW = 16_384
ROWS = 8  # packed rows of a step
SETTINGS = LossSettings("dapo", 0.2, 0.2, 0.5, 5.0, 0.0, True, 640)


@dataclass(frozen=True)
class Tree:
    """Completions of a prompt, tokens of the prompt, tokens of a completion."""

    group: int
    prompt: int
    completion: int

    @classmethod
    def parse(cls, text: str) -> Tree:
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        return f"{self.group} × ({self.prompt:,} shared + {self.completion:,})"

    def scaled(self, scale: float) -> Tree:
        return Tree(self.group, max(4, int(self.prompt * scale)), max(4, int(self.completion * scale)))

    def packed_groups(self, row: int) -> int:
        """Groups that fit into a row of so many tokens; a branch costs one token more."""
        return max(1, row // (self.prompt + self.group * (self.completion + 1)))

    def unpacked_samples(self, row: int) -> int:
        return max(1, row // (self.prompt + self.completion))


TREES = tuple(map(Tree.parse, ("8,2560,640", "8,640,160", "4,3500,250", "4,1400,100")))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sizes", nargs="+", default=["1.7B", "4B"], choices=SIZES)
    options.add_argument(
        "--trees", nargs="+", type=Tree.parse, default=TREES, help="completions,prompt,completion tokens"
    )
    options.add_argument(
        "--trained", nargs="+", type=float, default=[1.0], help="shares of a completion's tokens that are trained"
    )
    options.add_argument("--scale", type=float, default=1.0, help="shrinks everything, to try the program on a CPU")
    options.add_argument("--rows", type=int, default=ROWS, help="packed rows of a step")
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights")
    options.add_argument("--no-checkpointing", action="store_true")
    options.add_argument("--plain", action="store_true", help="layers not compiled")
    options.add_argument("--profile", type=Path, help="write where a packed row's time goes to this file")
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and "tiny" not in arguments.sizes:
        print("bench/train_step.py needs a CUDA device; there is none")
        return
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {choose_backend(device, torch.bfloat16)}, {vars(arguments)}", flush=True)
    for size in arguments.sizes:
        bench(size, arguments, device)


def bench(size: str, arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    vocabulary = 500 if size == "tiny" else VOCABULARY
    config = Qwen3Config(
        **SIZES[size], num_key_value_heads=8 if size != "tiny" else 2, head_dim=128 if size != "tiny" else 16,
        vocab_size=vocabulary, max_position_embeddings=8192, tie_word_embeddings=True, attn_implementation=IMPLEMENTATION,
    )  # fmt: skip
    with device:
        model: Any = Qwen3ForCausalLM(config).train()
    model.to(getattr(torch, arguments.dtype))
    install_scoring(model)
    if not arguments.no_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not arguments.plain:
        compile_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    for tree in arguments.trees:
        for trained in arguments.trained:
            print(f"{size} {tree}, {trained:.0%} of the completion trained", flush=True)
            compare(model, optimizer, tree.scaled(arguments.scale), trained, arguments, device)


def compare(
    model: Any, optimizer: Any, tree: Tree, trained: float, arguments: argparse.Namespace, device: torch.device
) -> None:
    """The same samples packed and unpacked, and what became of the bar."""
    counter, peak = FlopCounter.of(model), peak_flops(device, autocast=True)
    row = int(ROW * arguments.scale)
    groups = tree.packed_groups(row)
    items = samples(tree, groups * arguments.rows, trained, model.config.vocab_size)
    results = {}
    for label, samples_a_row in (("packed", groups * tree.group), ("unpacked", tree.unpacked_samples(row))):
        rows = make_rows(items, samples_a_row, share=label == "packed")
        measured = [step(model, optimizer, rows, device) for _ in range(3)]
        compute = float(np.median([one[0] for one in measured[1:]]))
        whole = float(np.median([one[1] for one in measured[1:]]))
        work = sum(
            counter.total(row.tokens, counter.pairs(row.layout.position_ids), scored_positions(row)) for row in rows
        )
        results[label] = whole, work, sum(row.tokens for row in rows), measured[-1][2]
        mfu = "" if peak is None else f"{100 * work / compute / peak:5.1f} %"
        print(
            f"{label:>9}: {len(rows)} rows of {rows[0].tokens}, fwd-bwd {compute:.3f} s, step {whole:.3f} s, "
            f"MFU {mfu}, {work / compute / 1e12:.0f} TFLOP/s, peak {measured[-1][2]:.1f} GiB, "
            f"loss {measured[0][3]:+.5f}",
            flush=True,
        )
        if arguments.profile:
            with arguments.profile.open("a") as file:
                file.write(f"\n{tree}, {trained} trained, {label}\n{profiled(model, optimizer, rows[:1], device)}")
    (fast, work, tokens, memory), (slow, raw_work, raw_tokens, raw_memory) = results["packed"], results["unpacked"]
    ratio, speed_up, fall = raw_tokens / tokens, slow / fast, raw_work / work
    verdict = "reached" if speed_up >= 0.95 * ratio else "missed"
    print(
        f" speed-up {speed_up:.2f} at packing ratio {ratio:.2f} ({speed_up / ratio:.3f} of it, bar 0.95: {verdict}); "
        f"FLOPs fall {fall:.2f} times ({speed_up / fall:.3f} of it); peak memory {memory:.1f} against {raw_memory:.1f} GiB",
        flush=True,
    )


def samples(tree: Tree, groups: int, trained: float, vocabulary: int) -> list[PackItem]:
    rng = np.random.default_rng(0)
    found = []
    for group in range(groups):
        prompt = rng.integers(0, vocabulary, tree.prompt)
        for index in range(tree.group):
            ids = np.concatenate([prompt, rng.integers(0, vocabulary, tree.completion)])
            mask = np.zeros(len(ids), np.int64)
            mask[tree.prompt :] = rng.random(tree.completion) < trained
            mask[-1] = 1
            top = np.full((len(ids), NUM_TOP), -2.5, np.float32)
            sample = RolloutSample(
                group_id=str(group), rollout_id=f"{group}-{index}", row_index=group, epoch=0, weight_version=0,
                input_ids=ids, completion_mask=mask, log_probs=np.full(len(ids), -12.0, np.float32),
                advantage=float(rng.normal()), reward=0.0, truncated=False, queued_at=time.time(), group_size=tree.group,
                top_ids=rng.integers(0, vocabulary, top.shape), top_log_probs=top,
            )  # fmt: skip
            item = PackItem.of(sample)
            assert item is not None
            found.append(item)
    return found


def make_rows(items: list[PackItem], samples_a_row: int, share: bool) -> list[PackedRow]:
    """Rows of so many samples. Without sharing, a token of its own in front of each sample keeps them apart."""
    plans = []
    for start in range(0, len(items), samples_a_row):
        plan = RowPlan(pair_cost=0.0)
        for index, item in enumerate(items[start : start + samples_a_row]):
            plan.add(item if share else apart(item, index))
        plans.append(plan)
    return [collate(plan, NUM_TOP) for plan in plans]


def apart(item: PackItem, index: int) -> PackItem:
    ids = item.sample.input_ids.copy()
    ids[0] = index
    copy = PackItem.of(replace(item.sample, input_ids=ids))
    assert copy is not None
    return copy


def step(
    model: Any, optimizer: Any, rows: list[PackedRow], device: torch.device, autocast: bool = True
) -> tuple[float, float, float, float]:
    """Seconds of forward and backward, of the whole step, peak GiB, and the loss."""
    totals = StepTotals(sum(row.terms for row in rows), sum(row.samples for row in rows))
    backend = choose_backend(device, torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started, losses = now(device), []
    for row in rows:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            terms = loss_inputs(model, row, device=device, backend=backend, temperature=1.0, weight_version=0)
            loss, _ = policy_loss(terms, SETTINGS, totals)
        loss.backward()
        losses.append(loss.detach())  # a number would have to be waited for
    computed = now(device)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ended = now(device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return computed - started, ended - started, peak, float(sum(losses))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def profiled(model: Any, optimizer: Any, rows: list[PackedRow], device: torch.device) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step(model, optimizer, rows, device)
    return found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=80)


if __name__ == "__main__":
    main()
