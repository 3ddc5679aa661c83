"""What a reward function may return, checked in one place. Light: standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def check_values(values: Any, expected: int, name: str) -> list[float | None]:
    """The rewards as floats, None where unscorable.

    Raises ValueError with one sentence that says what was found: no list, the wrong number, text, NaN, infinity.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} returned {_short(values)}; a list of {expected} numbers (or None) is expected")
    found = list(values)
    if len(found) != expected:
        raise ValueError(f"{name} returned {len(found)} rewards for {expected} completions; one for each is expected")
    return [_number(value, position, name) for position, value in enumerate(found)]


def _number(value: Any, position: int, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise ValueError(f"{name} returned {_short(value)} for completion {position}; a number or None is expected")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} returned {_short(value)} for completion {position}; a number or None is expected"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {number} for completion {position}; a finite number or None is expected")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
