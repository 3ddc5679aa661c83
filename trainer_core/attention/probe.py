"""A first try of a kernel whose code comes from elsewhere: does it run here, and does it compute attention?

A kernel of the hub is downloaded in its newest build, and the functions we call are not its public ones. So before one is
chosen it attends over a small tree, forward and backward, beside the masked reference. What raises or is wrong is passed over.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trainer_core.attention.kernels import ScoreRule
from trainer_core.attention.layout import TreeLayout
from trainer_core.attention.sdpa import sdpa_tree_attention
from trainer_core.packing.trie import PrefixTrie

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TreeLayout, ScoreRule], torch.Tensor]

HEADS, KEY_HEADS, WIDTH = 4, 2, 128
TOLERANCE = 2e-2
"""Of the norm. Operands in bfloat16 cost some 3e-3."""


def flaw(attend: Attend, device: torch.device, dtype: torch.dtype, softcap: bool) -> str:
    """What is wrong with a kernel, as half a sentence; empty when nothing is."""
    try:
        return next(filter(None, (_compare(attend, device, dtype, rule) for rule in _rules(softcap))), "")
    except Exception as error:  # noqa: BLE001  foreign code may raise anything, and each of it means: not this one
        return f"it raised {type(error).__name__}: {(str(error) or 'no text').splitlines()[0]:.200}"


def _rules(softcap: bool) -> list[ScoreRule]:
    cap = 20.0 if softcap else None
    return [ScoreRule(WIDTH**-0.5, None, cap), ScoreRule(WIDTH**-0.5, 24, cap)]


def _compare(attend: Attend, device: torch.device, dtype: torch.dtype, rule: ScoreRule) -> str:
    layout = _layout(device)
    draw = torch.Generator().manual_seed(0)  # a stream of its own: the run's own draws are not disturbed
    drawn = [torch.randn(1, heads, layout.tokens, WIDTH, generator=draw) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    weight = torch.randn(1, layout.tokens, HEADS, WIDTH, generator=draw).to(device, dtype)
    q, k, v = mine = [tensor.to(device, dtype).requires_grad_() for tensor in drawn]
    exact = [tensor.detach().float().requires_grad_() for tensor in mine]
    found, wanted = attend(q, k, v, layout, rule), sdpa_tree_attention(exact[0], exact[1], exact[2], layout, rule)
    found.backward(weight)
    wanted.backward(weight.float())
    pairs: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = [("output", found, wanted)]
    pairs += [(f"gradient of {name}", a.grad, b.grad) for name, a, b in zip("qkv", mine, exact, strict=True)]
    for name, got, right in pairs:
        if got is None or right is None:
            return f"its {name} is missing"
        error = float((got.detach().float() - right.detach()).norm() / right.detach().norm())
        if not error < TOLERANCE:  # NaN is not below it either
            return f"its {name} is off by {error:.1%}"
    return ""


def _layout(device: torch.device) -> TreeLayout:
    """Two prompts with three completions each, the first two of which fork late: partial calls of every kind."""
    trie = PrefixTrie()
    for prompt in (1, 2):
        shared = [prompt] * 40
        for tail in ([3] * 20 + [4] * 9, [3] * 20 + [5] * 7, [6] * 30):
            trie.insert(np.array(shared + tail))
    return TreeLayout(trie.layout(), device, "probe")
