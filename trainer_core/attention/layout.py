"""What attention needs to know about a packed row, computed once a row and used by every layer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from trainer_core.attention.blocks import QueryBlock, query_blocks
from trainer_core.attention.calls import GatheredCall, PartialCall, extra_work, gathered_call, partial_calls
from trainer_core.packing.trie import TrieLayout

COPY_LIMIT = 1.0
"""Keys copied for each query saved from a further call, up to which copying is faster (docs/performance.md)."""


class TreeLayout:
    """A row's layout on a device, and what each backend derives from it, cached.

    `backend` names the attention backend of `trainer_core.attention.interface`. Token i sees token j exactly when
    j <= i < subtree_end[j], and, under a sliding window, depth[i] - depth[j] < window.
    """

    def __init__(self, trie: TrieLayout, device: torch.device, backend: str) -> None:
        self.backend = backend
        self.device = device
        self.segments = trie.segments
        self.depths = trie.position_ids
        self._by_window: dict[tuple[str, int | None], Any] = {}

    @property
    def tokens(self) -> int:
        """Unique tokens, N."""
        return len(self.depths)

    @cached_property
    def subtree_ends(self) -> np.ndarray:
        """For each token the end of its segment's subtree, [N]."""
        starts, ends, _, subtree_ends = self.segments.T
        return np.repeat(subtree_ends, ends - starts)

    def effective_window(self, window: int | None) -> int | None:
        """None when the window reaches beyond the longest path, so that it hides nothing."""
        return None if window is None or window > int(self.depths.max(initial=0)) else window

    @cached_property
    def partial_calls(self) -> list[PartialCall]:
        """The kernel calls that together are tree attention without a window."""
        return partial_calls(self.segments, self.device)

    @cached_property
    def gathering_pays(self) -> bool:
        """Whether copying each path's keys costs less than passing over the branches' queries again."""
        queries, copied_keys = extra_work(self.segments)
        return 0 < copied_keys <= COPY_LIMIT * queries

    def gathered_call(self, window: int | None) -> GatheredCall:
        """The one kernel call over paths whose keys are gathered."""
        return self.cached("gathered", window, lambda: gathered_call(self.segments, window, self.device))

    def blocks(self, window: int | None) -> list[QueryBlock]:
        """The row cut into masked query blocks."""
        return self.cached("blocks", window, lambda: query_blocks(self.segments, self.depths, window, self.device))

    def cached(self, name: str, window: int | None, make: Any) -> Any:
        """What `make()` returned the first time it was asked for under this name and window."""
        key = name, window
        if key not in self._by_window:
            self._by_window[key] = make()
        return self._by_window[key]
