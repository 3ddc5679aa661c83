"""Runs that look real, for tests of pages: written as a trainer writes them, and shipped as a supervisor ships them."""

from __future__ import annotations

import json
import math
import random
from datetime import timedelta
from typing import Any

import orjson
from django.utils import timezone

from trainer_core.spec import RunSpec
from webapp.accounts.models import User
from webapp.hosts.models import Device, Host, Lease
from webapp.metrics.store import ship_spool
from webapp.rollouts.store import ship_rollouts
from webapp.runs import services
from webapp.runs.lifecycle import record
from webapp.runs.models import ENDED, Attempt, Run, State
from webapp.runs.sample import sample_spec

PASSWORD = "correct horse battery"


def make_user(name: str = "ada", **fields: Any) -> User:
    return User.objects.create_user(name, password=PASSWORD, **fields)


def make_host(name: str = "workbench") -> Host:
    host, _ = Host.objects.get_or_create(
        name=name, defaults={
            "cpu_count": 2, "memory_mib": 24_000, "last_seen_at": timezone.now(), "load": 1.4, "memory_free_mib": 9_300,
            "disk_mib": 480_000, "disk_free_mib": 31_000,
        }
    )  # fmt: skip
    Device.objects.get_or_create(
        uuid=f"cpu:{name}", defaults={"host": host, "kind": "cpu", "name": "CPU slot of 2 cores", "memory_mib": 24_000}
    )
    return host


def seeded_spec() -> RunSpec:
    """The sample's settings, with 40 steps and a checkpoint every 20 whatever the sample itself has."""
    spec = sample_spec()
    return spec.model_copy(update={
        "training": spec.training.model_copy(update={"max_steps": 40}),
        "checkpoints": spec.checkpoints.model_copy(update={"save_steps": 20}),
    })  # fmt: skip


def make_run(
    owner: User, name: str = "products, LoRA r=16", *, state: str = State.RUNNING, steps: int = 24, spec: RunSpec | None = None,
    reason: str = "", rollouts: bool = True, lease: bool = False, seed: int = 0,
) -> Run:  # fmt: skip
    """A run in `state` with `steps` optimizer steps reported; its checkpoint folders and logs exist on disk."""
    spec = (spec or seeded_spec()).model_copy(update={"name": name})
    run = services.create_run(spec, owner)
    if state == State.DRAFT:
        return run
    now = timezone.now()
    started = now - timedelta(seconds=12 * steps + 40)
    ended = now if state in ENDED else None
    Run.objects.filter(pk=run.pk).update(
        state=state,
        reason=reason,
        queued_at=started,
        started_at=None if state == State.QUEUED else started,
        ended_at=ended,
    )
    run.refresh_from_db()
    host = None if state == State.QUEUED else make_host()
    attempt = Attempt.objects.create(
        run=run, number=1, host=host, state=state, started_at=started, heartbeat_at=now, ended_at=ended
    )
    record(run, f"state:{state}", reason or f"The run is {state}.", attempt=attempt)
    if steps:
        write_attempt(attempt, steps, spec, random.Random(seed))
        if rollouts:
            write_rollouts(attempt, steps, spec, random.Random(seed))
    if lease and host is not None:
        device = host.devices.first()
        assert device is not None
        Lease.objects.create(device=device, attempt=attempt, purpose="both")
    run.refresh_from_db()
    return run


def write_attempt(attempt: Attempt, steps: int, spec: RunSpec, rng: random.Random, first: int = 1) -> None:
    """Spool, logs and checkpoint folders of an attempt."""
    begin = (attempt.started_at or timezone.now()).timestamp() + 40
    lines = [_event(begin, 0, "info", "started", "Training starts.")]
    for step in range(first, first + steps):
        at = begin + 12 * (step - first)
        lines.append({"v": 1, "kind": "metrics", "t": at, "step": step, "values": _values(step, spec, rng)})
        if step == first:
            lines.append(_event(at, step, "info", "first_step", "The first optimizer step is done."))
        if step % spec.checkpoints.save_steps == 0:
            lines.append(_checkpoint(attempt, at, step))
    spool = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    ship_spool(attempt, attempt.spool_offset, spool)
    attempt.folder.mkdir(parents=True, exist_ok=True)
    (attempt.folder / "spool.jsonl").write_bytes(spool)
    (attempt.folder / "trainer.log").write_text(
        "".join(
            f"2026-11-30 12:{step % 60:02d}:00 INFO trainer: step {step} loss 0.0{step % 7}\n"
            for step in range(first, first + steps)
        )
    )
    (attempt.folder / "server-0.log").write_text(
        "\x1b[32mINFO\x1b[0m server up\nLoading weights:  10%\rLoading weights: 100%\nWARNING the cache is small\n"
    )


def _values(step: int, spec: RunSpec, rng: random.Random) -> dict[str, float]:
    reward = 0.38 + 0.58 / (1 + math.exp(-(step - 12) / 3)) + rng.gauss(0, 0.02)
    wait = max(0.2, rng.gauss(3.1, 0.5))
    parts = {"perf/fwd_bwd_s": rng.gauss(6.8, 0.3), "perf/optimizer_s": 0.4, "perf/planner_s": 0.02,
             "perf/weight_sync_s": rng.gauss(0.9, 0.1), "perf/rollout_wait_s": wait}  # fmt: skip
    return {
        "reward": min(reward, 1.0), "rewards/trained_mean": min(reward, 1.0) * 0.8,
        "rewards/last_number_match": min(reward, 1.0),
        "reward_std": max(0.02, 0.4 - step * 0.012), "frac_reward_zero_std": min(0.9, 0.05 + step * 0.02),
        "loss": rng.gauss(0, 0.01), "grad_norm": abs(rng.gauss(0.4, 0.1)), "kl": abs(rng.gauss(0.002, 0.0006)),
        "entropy": max(0.08, 1.1 - step * 0.03), "learning_rate": spec.training.learning_rate, "ratio": rng.gauss(1, 0.003),
        "clip_ratio/low_mean": abs(rng.gauss(0.003, 0.001)), "clip_ratio/high_mean": abs(rng.gauss(0.004, 0.001)),
        "clip_ratio/region_mean": 0.007, "sampling/masked_mean": abs(rng.gauss(0.001, 0.0004)), "epoch": step * 8 / 500,
        "sample/rollout_queue_size": max(0, rng.gauss(9, 3)), "sample/staleness_mean": abs(rng.gauss(0.9, 0.2)),
        "sample/staleness_max": rng.choice([1, 2, 2, 3]), "rollout/backpressure_s": max(0, rng.gauss(0.4, 0.2)),
        "perf/step_s": sum(parts.values()), **parts,
        "perf/forwarded_tok_s_fwd_bwd": rng.gauss(420, 12), "perf/forwarded_tok_s_wall_clock": rng.gauss(262, 9),
        "rollout/generated_tok_s": rng.gauss(171, 11), "rollout/concurrency": rng.gauss(60, 4), "rollout/concurrency_cap": 64,
        "vllm/kv_cache_usage": rng.uniform(0.1, 0.3), "vllm/running": rng.gauss(40, 3), "vllm/waiting": 0,
        "vllm/prefix_cache_hit_frac": 0.7, "batch/row_fill_frac": rng.uniform(0.6, 0.9),
        "batch/packing_ratio": rng.gauss(2.1, 0.1),
        "completions/mean_length": max(6, 13 - step * 0.2), "completions/min_length": 3, "completions/max_length": 16,
        "completions/clipped_ratio": max(0, 0.3 - step * 0.01), "system/cpu": rng.uniform(70, 98),
    }  # fmt: skip


def _event(at: float, step: int, level: str, name: str, text: str, **data: Any) -> dict[str, Any]:
    return {"v": 1, "kind": "event", "t": at, "step": step, "level": level, "name": name, "text": text, "data": data}


def _checkpoint(attempt: Attempt, at: float, step: int) -> dict[str, Any]:
    folder = attempt.run.folder / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 16}))
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 300_000)
    (folder / "README.md").write_text("# An adapter\n")
    (folder / "optimizer.pt").write_bytes(b"\0" * 500_000)
    (folder / "rollout_state.json").write_text("{}")
    size = sum(file.stat().st_size for file in folder.iterdir())
    text = f"Checkpoint of step {step} written."
    return _event(at, step, "info", "checkpoint", text, path=str(folder), size_bytes=size, kind="adapter")


def write_rollouts(attempt: Attempt, steps: int, spec: RunSpec, rng: random.Random) -> None:
    """Two groups of each step, of one-digit products."""
    begin = (attempt.started_at or timezone.now()).timestamp() + 30
    lines = []
    for step in range(steps):
        for group in range(2):
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            lines += _group(begin + 12 * step, step, f"{step}-{group}", 2 * step + group, a, b, spec, rng)
    ship_rollouts(attempt, attempt.rollouts_offset, b"".join(orjson.dumps(line) + b"\n" for line in lines))


def _group(
    at: float, step: int, group_id: str, row: int, a: int, b: int, spec: RunSpec, rng: random.Random
) -> list[dict[str, Any]]:
    size = spec.rollout.num_generations
    right = [rng.random() < 0.35 + step * 0.025 for _ in range(size)]
    mean = sum(right) / size
    deviation = math.sqrt(mean * (1 - mean)) or 1.0
    prompt = f"Solve the following multiplication: {a} * {b}. Give only the result as your final answer."
    lines = []
    for index, good in enumerate(right):
        answer = a * b if good else a * b + rng.choice([-2, -1, 1, 2, 10])
        text = rng.choice(
            [f"{a} * {b} = {answer}", f"The result is {answer}.", f"{answer}", f"{a} times {b} equals <b>{answer}</b>"]
        )
        rollout = {
            "group_id": group_id, "rollout_id": f"{group_id}-{index}", "row_index": row, "epoch": 0, "version": step,
            "prompt": [{"role": "user", "content": prompt}], "completion": [{"role": "assistant", "content": text}],
            "tokens": rng.randint(3, 16), "turns": 1, "finish_reason": "stop", "rewards": {"last_number_match": float(good)},
            "reward": float(good), "advantage": (good - mean) / deviation, "duration_s": round(rng.uniform(0.4, 2), 3),
            "dropped": "zero_variance" if mean in (0, 1) else None,
        }  # fmt: skip
        lines.append({"v": 1, "kind": "rollout", "t": at, "step": step, "rollout": rollout})
    return lines
