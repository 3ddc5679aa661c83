"""Text can be read in both themes: WCAG 2 contrast, computed from the colours of tokens.css."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOKENS = (Path(__file__).parents[2] / "static/css/tokens.css").read_text()
TEXT_PAIRS = [
    *(("text", ground) for ground in ("bg", "surface", "surface-2", "row-hover", "added", "removed", "selection")),
    *(("muted", ground) for ground in ("bg", "surface", "surface-2", "row-hover")),
    *((ink, ground) for ink in ("accent", "ok", "warn", "danger", "info") for ground in ("surface", "bg", f"{ink}-soft")),
    ("on-accent", "accent"), ("on-accent", "accent-hover"), ("on-danger", "danger"), ("on-danger", "danger-hover"),
    *((f"code-{part}", "surface") for part in ("keyword", "string", "number", "name")),
]  # fmt: skip
GRAPHIC_PAIRS = [("line-strong", "surface"), ("focus", "surface"), ("focus", "bg")] + [
    (f"chart-{number}", "surface") for number in range(1, 9)
]


def colours(theme: str) -> dict[str, str]:
    light, dark = TOKENS.split(':root[data-theme="dark"]')
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    return found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark)) if theme == "dark" else found


def luminance(colour: str) -> float:
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_knows_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("pairs, least", [(TEXT_PAIRS, 4.5), (GRAPHIC_PAIRS, 3.0)])
def test_contrast_is_enough(theme: str, pairs: list[tuple[str, str]], least: float) -> None:
    known = colours(theme)
    low = {pair: round(contrast(known[pair[0]], known[pair[1]]), 2) for pair in pairs}
    assert {pair: value for pair, value in low.items() if value < least} == {}
