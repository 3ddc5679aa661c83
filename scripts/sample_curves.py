"""Draw the curves of docs/sample-run.md from what `make demo` kept, and print its table.

usage: sample_curves.py FOLDER [FOLDER ...] > table.md      each FOLDER was given to demo.py --keep
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "sample-run.svg"
COLOURS = ("#3546c8", "#c2410c", "#0f766e")
WIDTH, HEIGHT, LEFT, TOP = 720, 320, 48, 16
PARTS = {
    "perf/step_s": "whole step",
    "perf/rollout_wait_s": "waiting for samples",
    "perf/fwd_s": "forward",
    "perf/fwd_bwd_s": "forward and backward",
    "perf/optimizer_s": "optimizer",
    "perf/weight_sync_s": "weight push",
    "perf/planner_s": "planning and packing",
    "rollout/backpressure_s": "generation held back",
}
WINDOW = 5


def main() -> None:
    curves = [json.loads((Path(folder) / "curve.json").read_text()) for folder in sys.argv[1:]]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture(curves))
    print(table(curves))


def table(curves: list[dict[str, Any]]) -> str:
    seeds = [f"seed {curve['seed']}" for curve in curves]
    lines = [f"| | {' | '.join(seeds)} |", "|---|" + "---|" * len(curves)]
    rewards = [[value for _, value in curve["reward"]] for curve in curves]
    lines.append(row(f"reward, first {WINDOW} steps", [f"{fmean(values[:WINDOW]):.3f}" for values in rewards]))
    lines.append(row(f"reward, last {WINDOW} steps", [f"{fmean(values[-WINDOW:]):.3f}" for values in rewards]))
    lines.append(row("first optimizer step after", [f"{curve['first_step_s']:.0f} s" for curve in curves]))
    lines.append(row("launch to end", [f"{curve['run_s'] / 60:.1f} min" for curve in curves]))
    for metric, title in PARTS.items():
        lines.append(
            row(f"{title}, median", [f"{median(value for _, value in curve[metric]):.2f} s" for curve in curves])
        )
    mean = [f"{fmean(value for _, value in curve['sample/staleness_mean']):.2f}" for curve in curves]
    lines.append(row("staleness, mean", mean))
    rate = [f"{median(value for _, value in curve['rollout/generated_tok_s']):.0f} tok/s" for curve in curves]
    lines.append(row("generated, median", rate))
    return "\n".join(lines)


def row(title: str, cells: list[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def picture(curves: list[dict[str, Any]]) -> str:
    """Reward against step, one line a seed, as SVG that reads on light and dark pages."""
    last = max(step for curve in curves for step, _ in curve["reward"])

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 110) * step / last

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - 40) * (1 - reward)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for level in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(f'<path d="M{LEFT} {y(level):.1f}H{x(last):.1f}" stroke="#e2e5ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end" fill="#566070">{level:.1f}</text>')
    for step in range(0, last + 1, 10):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="#566070">{step}</text>')
    parts.append(
        f'<text x="{x(last / 2):.1f}" y="{HEIGHT - 5}" text-anchor="middle" fill="#566070">optimizer step</text>'
    )
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve["reward"])
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 96}" y="{TOP + 20 + 18 * number}" fill="{colour}">seed {curve["seed"]}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
