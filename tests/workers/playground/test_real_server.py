"""Worker, supervisor and vLLM as they are: two states of a run answer, and a killed server leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import tiny_qwen3
from tests.workers.conftest import HOST, Studio, wait_for
from tests.workers.test_lifecycle import wait_for_state

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(1200)]
STARTS_IN_S = 900.0  # less than a minute where the machine has nothing else to do


def save_adapter(folder: Path) -> None:
    """A LoRA adapter of the tiny model that changes its answers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3())
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)


def ask(run: Any, key: str) -> str:
    from webapp.playground import server

    live = server.look(run)
    request = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 12, "temperature": 0}

    async def talk() -> list[dict[str, Any]]:
        return [json.loads(piece) async for piece in server.talk(live, live.choice(key), request)]

    lines = asyncio.run(talk())
    assert "done" in lines[-1], lines
    return "".join(line.get("text", "") for line in lines)


def test_checkpoints_of_a_run_that_is_over_answer(studio: Studio, make_run: Callable[..., Any]) -> None:
    from django.utils import timezone

    from webapp.hosts.models import Host, Lease, PortLease
    from webapp.playground import services
    from webapp.runs.models import Run
    from workers import processes

    run = make_run(
        "over", model={"path": str(tiny_qwen3())}, lora={"r": 8},
        server={"max_model_len": 512, "dtype": "float32", "kv_cache_gib": 0.0625, "max_num_seqs": 4, "max_restarts": 0},
        rollout={"max_completion_length": 64},
    )  # fmt: skip
    Run.objects.filter(pk=run.pk).update(state="completed")
    run.refresh_from_db()
    checkpoint = run.checkpoints.create(attempt=run.current_attempt, step=5, kind="adapter", created_at=timezone.now())
    save_adapter(checkpoint.folder)
    studio.start_worker("workers.tasks")
    wait_for(lambda: Host.objects.filter(name=HOST).exists(), "the worker", 300)

    own = services.start(run, run.owner)
    wait_for_state(own, "starting", "failed", seconds=120)
    wait_for_state(own, "running", "failed", seconds=STARTS_IN_S)
    assert own.state == "running", (own.reason, own.log)
    answers = {key: ask(run, key) for key in ("base", f"checkpoint-{checkpoint.pk}", "base")}
    assert len(set(answers.values())) == 2, "the adapter answers otherwise than the base model"

    blocks = processes.shared_memory(studio.marked(own))
    studio.program(own, "vllm.entrypoints.cli.main").kill()
    wait_for_state(own, "failed", "stopped", seconds=120)
    assert own.reason.startswith("The vLLM server died: The server was killed (SIGKILL)")
    assert own.log
    wait_for(lambda: not studio.marked(own), "the supervisor's end", 60)
    assert not Lease.objects.exists()
    assert not PortLease.objects.exists()
    assert [block for block in blocks if Path(block).exists()] == []
