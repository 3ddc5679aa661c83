"""A run's reward curve as a picture that needs nothing else: for model cards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 640, 260
LARGEST = 1e12
"""Values beyond are drawn as this: the axis could not hold them."""
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 30, 36


def svg(steps: Sequence[float], values: Sequence[float], marked: int) -> str:
    """The curve as SVG, with the checkpoint's step marked. Values that are not finite are left out."""
    pairs = [
        (float(x), min(max(float(y), -LARGEST), LARGEST)) for x, y in zip(steps, values, strict=True) if np.isfinite(y)
    ]
    xs = [x for x, _ in pairs] or [0.0, 1.0]
    ys = [y for _, y in pairs] or [0.0, 1.0]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    low_x, high_x = min(xs[0], x_ticks[0]), max(xs[-1], x_ticks[-1])
    low_y, high_y = y_ticks[0], y_ticks[-1]

    def place_x(x: float) -> float:
        return round(LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT), 1)

    def place_y(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="600" fill="#18202b">Mean reward by step</text>',
    ]
    for tick in y_ticks:
        y = place_y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e7eaef"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#566273">{tick:g}</text>')
    for tick in x_ticks:
        x = place_x(tick)
        parts.append(f'<text x="{x}" y="{HEIGHT - 14}" text-anchor="middle" fill="#566273">{tick:g}</text>')
    if low_x <= marked <= high_x:
        x = place_x(marked)
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#c2410c" stroke-dasharray="4 3"/>'
        )
        anchor = "end" if x > WIDTH / 2 else "start"
        shift = -6 if x > WIDTH / 2 else 6
        parts.append(
            f'<text x="{x + shift}" y="{HEIGHT - BOTTOM - 8}" text-anchor="{anchor}" fill="#c2410c">this checkpoint</text>'
        )
    if pairs:
        line = " ".join(f"{place_x(x)},{place_y(y)}" for x, y in pairs)
        parts.append(f'<polyline points="{line}" fill="none" stroke="#3347c4" stroke-width="1.8"/>')
    else:
        parts.append(
            f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" fill="#566273">no reward known</text>'
        )
    return "".join([*parts, "</svg>\n"])


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers that reach from below `low` to above `high`."""
    least = 1e-6 * max(1.0, abs(low), abs(high))
    if high - low < least:
        low, high = low - least, high + least
    size = 10.0 ** np.floor(np.log10((high - low) / 2))
    step = next(factor * size for factor in (0.5, 1, 2, 5, 10) if (high - low) / (factor * size) <= 5)
    first, last = int(np.floor(low / step)), int(np.ceil(high / step))
    return [round(index * step, 12) for index in range(first, last + 1)]
