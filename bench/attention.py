"""Tree attention on a GPU against the same kernel on unpacked samples, forward and backward.

    python bench/attention.py [--backends varlen fa4 ...] [--profile FILE]

The bar: no slower than 1.25 times what the number of query-key pairs allows at the rate of the same kernel unpacked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from trainer_core.attention import layout as layout_module
from trainer_core.attention.backends import BACKENDS, KERNELS, attend
from trainer_core.attention.calls import extra_work
from trainer_core.attention.kernels import ScoreRule
from trainer_core.attention.layout import TreeLayout
from trainer_core.packing.trie import PrefixTrie, TrieLayout

# prompts, completions of each, tokens of a prompt, tokens of a completion
TREES = ((2, 8, 2000, 500), (1, 8, 8000, 2000), (4, 8, 200, 1000))
# Where copying keys and merging calls cost about the same: these set COPY_LIMIT.
UNDECIDED = ((2, 8, 500, 1000), (2, 8, 1000, 1000))
QUERY_HEADS, KEY_HEADS, WIDTH = 16, 8, 128
BAR = 1.25
REPEATS = 15


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    options.add_argument("--profile", type=Path, help="write where the time goes to this file")
    arguments = options.parse_args()
    if not torch.cuda.is_available():
        print("bench/attention.py needs a CUDA device; there is none")
        return
    device = torch.device("cuda")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {QUERY_HEADS}/{KEY_HEADS} heads of {WIDTH}"
    )
    print("forward + backward, ms, median of", REPEATS)
    print(
        f"{'tree':>18} {'backend':>8} {'unpacked':>9} {'pairs':>6} {'allowed':>8} {'tree':>7} {'tree/bound':>10} {'fwd':>6}"
    )
    profiles: list[str] = []
    for tree in TREES:
        for name in arguments.backends:
            try:
                run = attend(name)
            except ValueError as error:
                print(f"{tree!s:>18} {name:>8} {error}")
                continue
            measure(name, run, tree, device, profiles if arguments.profile else None)
    print("merged / gathered, ms")
    for tree in (*UNDECIDED, TREES[2]):
        layout = rows(tree)[0][0]
        queries, keys = extra_work(layout.segments)
        for name in (name for name in arguments.backends if name in KERNELS):
            times = []
            for limit in (0.0, float("inf")):
                layout_module.COPY_LIMIT = limit
                times.append(milliseconds(step(attend(name), TreeLayout(layout, device, name), device)[0]))
            print(f"{tree!s:>18} {name:>8} copied keys / queries {keys / queries:.2f}: {times[0]:.2f} / {times[1]:.2f}")
    if arguments.profile:
        arguments.profile.write_text("\n\n".join(profiles))


def measure(
    name: str, run: Any, tree: tuple[int, int, int, int], device: torch.device, profiles: list[str] | None
) -> None:
    packed, raw = rows(tree)
    ours = step(run, TreeLayout(packed[0], device, name), device)
    time, forward = milliseconds(ours[0]), milliseconds(ours[1])
    label = f"{tree!s:>18} {name:>8}"
    if profiles is not None:
        profiles.append(f"{label}\n{where_time_goes(ours[0])}")
    if name not in KERNELS:
        print(f"{label} {'':>9} {'':>6} {'':>8} {time:7.2f} {'':>10} {forward:6.2f}", flush=True)
        return
    alone = milliseconds(step(run, TreeLayout(raw[0], device, name), device)[0])
    ratio = packed[1] / raw[1]
    verdict = "" if time <= BAR * ratio * alone else "  missed"
    print(
        f"{label} {alone:9.2f} {ratio:6.3f} {BAR * ratio * alone:8.2f} {time:7.2f} {time / (ratio * alone):10.2f} "
        f"{forward:6.2f}{verdict}",
        flush=True,
    )


def rows(tree: tuple[int, int, int, int]) -> tuple[tuple[TrieLayout, int], tuple[TrieLayout, int]]:
    """The packed row and the unpacked one, each with its number of pairs."""
    prompts, completions, prompt_tokens, tokens = tree
    rng = np.random.default_rng(0)
    packed = PrefixTrie()
    for _ in range(prompts):
        prompt = rng.integers(0, 100_000, prompt_tokens)
        for _ in range(completions):
            packed.insert(np.concatenate([prompt, rng.integers(0, 100_000, tokens + 1)]))
    samples, length = prompts * completions, prompt_tokens + tokens
    starts = np.arange(samples) * length
    segments = np.stack([starts, starts + length, np.full(samples, -1), starts + length], axis=1)
    ids = np.zeros(samples * length, np.int64)
    raw = TrieLayout(ids, np.tile(np.arange(length), samples), segments)
    return (packed.layout(), packed.pairs), (raw, samples * length * (length + 1) // 2)


def step(run: Any, layout: TreeLayout, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward with backward, and forward alone, on random data; the layout's own work is done here."""
    shape = (1, layout.tokens, QUERY_HEADS, WIDTH)
    inputs = [
        torch.randn(1, layout.tokens, heads, WIDTH, device=device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    ]
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16)
    rule = ScoreRule(WIDTH**-0.5)

    def forward() -> torch.Tensor:
        return run(*inputs, layout, rule)

    return lambda: torch.autograd.grad(forward(), inputs, grad), forward


def milliseconds(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in times]))


def where_time_goes(work: Callable[[], Any]) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            work()
        torch.cuda.synchronize()
    return found.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=70)


if __name__ == "__main__":
    main()
