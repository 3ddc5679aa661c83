"""What a chart must say, worked out from single points in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trainer_core.spool import encode_number


def same(found: Any, expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-30) or (math.isnan(a) and not math.isfinite(b))
        for a, b in zip(found, expected, strict=True)
    )


def check_rows(found: dict[str, Any], expected: dict[int, float]) -> None:
    """Each row stands for exactly the points behind the row before, up to its own step: none lost, doubled or hidden."""
    steps = sorted(expected)
    ends = np.searchsorted(steps, found["step"], side="right")
    assert found["step"].tolist() == [steps[end - 1] for end in ends]
    assert ends[-1] == len(steps)
    begin = 0
    odd = {index: set(kinds) for index, kinds in found["odd"]}
    for row, end in enumerate(ends.tolist()):
        members = [expected[step] for step in steps[begin:end]]
        finite = [value for value in members if math.isfinite(value)]
        mean = math.fsum(value / len(finite) for value in finite) if finite else math.nan
        columns = ("low", "high", "count") if "count" in found else ("y", "y", None)
        low, high = found[columns[0]][row], found[columns[1]][row]
        assert (1 if columns[2] is None else found["count"][row]) == len(members)
        assert same([low, high], [min(finite, default=math.nan), max(finite, default=math.nan)])
        largest = max((abs(value) for value in finite), default=0.0)
        assert math.isclose(found["y"][row], mean, rel_tol=1e-5, abs_tol=1e-6 * largest) or not finite
        assert odd.get(row, set()) == {str(encode_number(value)) for value in members if not math.isfinite(value)}
        begin = end
