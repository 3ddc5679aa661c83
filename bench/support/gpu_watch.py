"""Watches one run of bench/gpu_e2e.py from outside: its server's health, its spool, its state; and kills its server."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx
import orjson
import psutil

from bench.support.gpu_phases import Phase

BAR = 0.95
WINDOW = 5
"""Steps that the reward is averaged over before it is compared with the bar."""
TIMES = {
    "push": "perf/weight_sync_s", "pause": "perf/weight_sync_pause_s", "barrier": "perf/weight_sync_barrier_s",
    "transfer": "perf/weight_sync_transfer_s", "step": "perf/step_s", "forward_backward": "perf/fwd_bwd_s",
    "optimizer": "perf/optimizer_s", "rollout_wait": "perf/rollout_wait_s",
}  # fmt: skip
VALUES = (
    "perf/mfu_fwd_bwd", "perf/mfu_wall_clock", "perf/gpu_mem_peak_gib", "rollout/generated_tok_s", "sample/staleness_mean",
    "sampling/mismatch_kl", "kl", "completions/mean_length", "batch/packing_ratio",
)  # fmt: skip


class Watched:
    """A claimed run. Times are seconds since `start`, a reading of time.time()."""

    def __init__(self, phase: Phase, attempt: Any, start: float) -> None:
        self.phase = phase
        self.attempt = attempt
        self.run = attempt.run
        self.start = start
        self.claimed = self._now()
        self.ready: float | None = None
        self.kill: dict[str, Any] = {}
        self.reasons: list[tuple[float, str]] = []
        self.metrics: list[tuple[float, int, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self._offset = 0

    def _now(self) -> float:
        return round(time.time() - self.start, 2)

    @property
    def ended(self) -> bool:
        return not self.run.is_live

    @property
    def step(self) -> int:
        return self.metrics[-1][1] if self.metrics else 0

    def look(self) -> None:
        """Take up what happened since the last look, and kill the server when it is time."""
        self.run.refresh_from_db()
        if not self.reasons or self.reasons[-1][1] != self.run.reason:
            self.reasons.append((self._now(), self.run.reason))
        self._read_spool()
        if self.ready is None and self._healthy():
            self.ready = self._now()
        if self.phase.kill_at is not None and not self.kill and self.step >= self.phase.kill_at:
            self._kill()
        elif self.kill and "down" not in self.kill and not self._healthy():
            self.kill["down"] = self._now()
        elif "down" in self.kill and "up" not in self.kill and self._healthy():
            self.kill["up"] = self._now()

    def _healthy(self) -> bool:
        lease = self.attempt.ports.filter(purpose="vLLM server").first()
        with suppress(httpx.HTTPError):
            return (
                lease is not None and httpx.get(f"http://127.0.0.1:{lease.port}/health", timeout=1).status_code == 200
            )
        return False

    def _read_spool(self) -> None:
        path = self.attempt.folder / "spool.jsonl"
        if not path.exists():
            return
        with open(path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in map(orjson.loads, whole.splitlines()):
            at = round(line["t"] - self.start, 2)
            if line["kind"] == "metrics":
                self.metrics.append((at, line["step"], line["values"]))
            elif line["kind"] == "event":
                self.events.append({"at": at, **{name: line[name] for name in ("step", "level", "name", "text")}})

    def _kill(self) -> None:
        """SIGKILL the API server: the leader of the group that is not the trainer's. vLLM changes its title, so not by that."""
        from workers import processes

        groups, _ = processes.read_record(self.attempt.folder)
        for pid in groups:
            with suppress(psutil.Error, ProcessLookupError):
                if "trainer_core.launch" not in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)
                    self.kill = {"at": self._now(), "step": self.step, "pid": pid}
                    return

    # ---- what it came to ---------------------------------------------------------------------------------------------

    def rewards(self) -> list[tuple[int, float, float]]:
        """(step, seconds since the server was ready, reward) of each step that scored something."""
        begin = self.ready or self.claimed
        return [
            (step, round(at - begin, 2), values["reward"]) for at, step, values in self.metrics if "reward" in values
        ]

    def series(self, name: str) -> list[float]:
        return [values[name] for _, _, values in self.metrics if isinstance(values.get(name), (int, float))]

    def result(self) -> dict[str, Any]:
        rewards = self.rewards()
        reached = next(
            (rewards[i] for i in range(WINDOW - 1, len(rewards))
             if statistics.mean(reward for _, _, reward in rewards[i - WINDOW + 1 : i + 1]) >= BAR), None,
        )  # fmt: skip
        self.attempt.refresh_from_db()
        first = self.metrics[0][0] if self.metrics else None
        gpu_names = sorted({name for _, _, values in self.metrics for name in values if name.startswith("system/")})
        return {
            "phase": self.phase.name, "title": self.phase.title, "run": str(self.run.pk), "state": self.run.state,
            "reason": self.run.reason, "exit_code": self.attempt.exit_code, "restarts": self.attempt.server_restarts,
            "claimed_s": self.claimed, "ready_s": self.ready, "first_step_s": first, "steps": self.step,
            "reached_bar": None if reached is None else {"step": reached[0], "since_ready_s": reached[1]},
            "first_rewards": mean_of(rewards[:WINDOW]), "last_rewards": mean_of(rewards[-WINDOW:]), "rewards": rewards,
            "milliseconds": {name: spread(self.series(metric), 1000) for name, metric in TIMES.items()},
            "values": {name: spread(self.series(name)) for name in (*VALUES, *gpu_names)},
            "step0_max_abs_diff": next(iter(self.series("sampling/step0_max_abs_diff")), None),
            "kill": self._kill_result(rewards), "reasons": self.reasons, "events": self.events,
        }  # fmt: skip

    def _kill_result(self, rewards: list[tuple[int, float, float]]) -> dict[str, Any]:
        if not self.kill:
            return {}
        step = self.kill["step"]
        back = next((event["at"] for event in self.events if event["name"] == "server_back"), None)
        return {
            **self.kill, "server_back": back,
            "rewards_before": mean_of([row for row in rewards if step - 10 < row[0] <= step]),
            "rewards_after": mean_of([row for row in rewards if step < row[0] <= step + 10]),
        }  # fmt: skip


def mean_of(rewards: Sequence[tuple[int, float, float]]) -> float | None:
    return round(statistics.mean(reward for _, _, reward in rewards), 4) if rewards else None


def spread(values: Sequence[float], factor: float = 1.0) -> dict[str, float] | None:
    """First, median, 90th percentile and highest of what was measured."""
    if not values:
        return None
    ordered = sorted(factor * value for value in values)
    found = {
        "first": factor * values[0],
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
    }
    return {name: round(value, 4) for name, value in (found | {"max": ordered[-1], "count": len(ordered)}).items()}
