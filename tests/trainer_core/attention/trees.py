"""Random batches of token sequences that share prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st


@st.composite
def forests(
    draw: st.DrawFn, *, tokens: int = 40, longest: int, most: int, depth: int = 5, branching: int = 8
) -> list[list[int]]:
    """Up to `most` sequences of 1 to `longest` token ids below `tokens`, which fork up to `depth` times, into up to
    `branching` each time.

    Some end where others go on, as turns of a conversation do, some are there twice, and some share nothing.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="tokens"))
    roots = draw(st.integers(1, 3), label="prompts")
    open_paths: list[tuple[list[int], int]] = [([], 0)] * roots
    batch: list[list[int]] = []
    while open_paths and len(batch) < most:
        path, forks = open_paths.pop(int(rng.integers(len(open_paths))))
        room = longest - len(path)
        if not room:
            batch.append(path)
            continue
        path = path + rng.integers(0, tokens, draw(st.integers(1, room))).tolist()
        children = draw(st.integers(0, branching)) if forks < depth else 0
        if not children or draw(st.booleans()):
            batch.append(path)
        open_paths += [(path, forks + 1)] * children
    batch += [path for path, _ in open_paths if path][: most - len(batch)]
    return batch + ([batch[0]] if draw(st.booleans()) else [])
