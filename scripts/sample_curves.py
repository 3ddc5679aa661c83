"""Draw the curves of docs/sample-run.md from what `make demo` kept, and print its table; or those of docs/gpu-runs.md.

usage: sample_curves.py FOLDER [FOLDER ...] > table.md      each FOLDER was given to demo.py --keep
       sample_curves.py results.json                        what bench/gpu_e2e.py wrote
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "sample-run.svg"
GPU_PICTURE = PICTURE.with_name("gpu-runs.svg")
COLOURS = ("#3546c8", "#c2410c", "#0f766e", "#7c3aed", "#4d7c0f")
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 720, 320, 48, 16, 110
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


Line = tuple[str, list[tuple[float, float]]]
"""A label and its (x, reward) points."""


def main() -> None:
    if sys.argv[1].endswith(".json"):
        phases = json.loads(Path(sys.argv[1]).read_text())["phases"]
        lines = [(name, [(ready, reward) for _, ready, reward in run["rewards"]]) for name, run in phases.items()]
        GPU_PICTURE.write_text(picture(lines, "seconds since the server was ready", tick=60))
        return
    curves = [json.loads((Path(folder) / "curve.json").read_text()) for folder in sys.argv[1:]]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    lines = [(f"seed {curve['seed']}", curve["reward"]) for curve in curves]
    PICTURE.write_text(picture(lines, "optimizer step", tick=10))
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


def picture(lines: list[Line], axis: str, tick: int) -> str:
    """Reward along `axis`, one line each, as SVG that reads on light and dark pages; a mark on the axis every `tick`."""
    last = max(at for _, points in lines for at, _ in points)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - LEGEND) * at / last

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - 40) * (1 - reward)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for level in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(f'<path d="M{LEFT} {y(level):.1f}H{x(last):.1f}" stroke="#e2e5ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end" fill="#566070">{level:.1f}</text>')
    for at in range(0, int(last) + 1, tick):
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="#566070">{at}</text>')
    parts.append(f'<text x="{x(last / 2):.1f}" y="{HEIGHT - 5}" text-anchor="middle" fill="#566070">{axis}</text>')
    for number, ((label, points), colour) in enumerate(zip(lines, COLOURS, strict=False)):
        drawn = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - LEGEND + 14}" y="{TOP + 20 + 18 * number}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
