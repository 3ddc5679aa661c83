"""What bench/gpu_e2e.py found, as text."""

from __future__ import annotations

from typing import Any


def summary(found: dict[str, Any]) -> str:
    """A page for people: versions, one paragraph for each run, pushes, what was left behind."""
    lines = [
        f"{found.get('seconds')} s; " + ", ".join(f"{name} {value}" for name, value in found["versions"].items()),
        "",
    ]
    for name, run in found["phases"].items():
        lines += [f"{name}: {run['title']}", f"  {run['state']} at step {run['steps']}: {run['reason']}"]
        lines.append(
            f"  server ready {run['ready_s']} s, first step {run['first_step_s']} s; reward {run['first_rewards']} -> "
            f"{run['last_rewards']}; bar reached: {run['reached_bar']}"
        )
        times = {key: value for key, value in run["milliseconds"].items() if value}
        lines.append("  ms (median): " + ", ".join(f"{key} {value['median']:.1f}" for key, value in times.items()))
        values = {key: value for key, value in run["values"].items() if value}
        lines.append("  medians: " + ", ".join(f"{key} {value['median']:.4g}" for key, value in values.items()))
        lines.append(f"  step 0: largest difference of log-probabilities {run['step0_max_abs_diff']}")
        if run["kill"]:
            lines.append(f"  server killed: {run['kill']}; {run['restarts']} restarts")
        rewards = run["rewards"]
        marks = rewards[:: max(1, len(rewards) // 12)]
        lines.append("  reward: " + ", ".join(f"{step}:{reward:.2f} ({at:.0f} s)" for step, at, reward in marks))
        lines += [f"  {event['level']}: {event['text']}" for event in run["events"] if event["level"] != "info"][:8]
        lines.append("")
    for backend, pushed in (found.get("push") or {}).items():
        lines += [f"push by {backend}, {name}: {push}" for name, push in pushed.items()]
    lines.append(f"left behind: {found.get('left_behind')}")
    lines += [f"PROBLEM {problem}" for problem in found["problems"]]
    return "\n".join(lines) + "\n"
