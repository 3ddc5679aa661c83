"""Start one training attempt: python -m trainer_core.launch --spec RUN/spec.yaml ... (docs/architecture.md).

Checks go from cheap to expensive, so that a mistake is told in seconds and before the model is loaded. Every failure ends as
one sentence in a `failed` event of the spool, and exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_core import distributed
from trainer_core.explain import sentence
from trainer_core.inputs import Inputs, load_inputs
from trainer_core.spec import RunSpec
from trainer_core.spool import SPOOL_FILE, Spool

if TYPE_CHECKING:
    from trainer_core.config import AsyncGRPOConfig
    from trainer_core.trainer import AsyncGRPOTrainer

CHECKPOINTS = "checkpoints"
COLLECTIVE_DEADLINE_S = 600
"""How long trainer ranks may wait for one another in a step or a checkpoint; nothing but a hang takes as long."""
EXIT_S = 60.0
"""How long the process may take to end when all is done."""


def main(argv: list[str] | None = None) -> int:
    """Run the attempt; returns the exit code: 0 done or stopped by order, 1 failed."""
    arguments = _parser().parse_args(argv)
    spool = Spool(arguments.attempt_dir / SPOOL_FILE) if _rank() == 0 else None
    if spool is not None:
        distributed.when_lost = partial(spool.event, 0, "error", "failed", kind="RankLost")
    try:
        train(arguments, spool)
    except Exception as error:  # noqa: BLE001  whatever it is, the run's page has to say it
        traceback.print_exc()
        text = sentence(error)
        distributed.current.fail(error, text)
        if spool is not None:
            spool.event(0, "error", "failed", text, kind=type(error).__name__)
        return 1
    finally:
        if spool is not None:
            spool.close()
    return 0


def _rank() -> int:
    """Which of the trainer's processes this is, as accelerate's launcher says. Rank 0 alone writes the spool."""
    return int(os.environ.get("RANK", "0"))


def train(arguments: argparse.Namespace, spool: Spool | None) -> None:
    """Build the trainer from the spec and train. Raises what stopped it."""
    spec = _read_spec(arguments.spec)
    _check_model(arguments.model)
    if arguments.resume is not None:
        _check_checkpoint(arguments.resume)
    if arguments.start_from is not None and not arguments.start_from.is_dir():
        raise ValueError(f"the weights to start from, {arguments.start_from}, do not exist")
    _set_threads()

    from trainer_core.checkpoint import starting_point

    if spec.exporters.targets:
        from trainer_core import exporters

        os.environ.update(exporters.environment(spec.exporters, arguments.run_dir))
    trainer = build_trainer(spec, arguments, load_inputs(spec, arguments.run_dir))
    resume = arguments.resume
    if arguments.start_from is not None:
        batch_size = spec.training.per_device_train_batch_size
        resume = arguments.attempt_dir / "start"
        if _rank() == 0:
            starting_point(arguments.start_from, resume, batch_size)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    step, order = trainer.state.global_step, trainer.stop_order
    if spool is None:
        return
    if order is None:
        spool.event(step, "info", "finished", f"Training finished after {step} steps.")
    else:
        spool.event(step, "info", "stopped", f"Training was stopped after {step} steps.", order=order)


def build_trainer(spec: RunSpec, arguments: argparse.Namespace, inputs: Inputs) -> Any:
    """The trainer of a spec, with its model loaded."""
    from transformers import PrinterCallback

    from trainer_core.trainer import AsyncGRPOTrainer

    trainer: AsyncGRPOTrainer = AsyncGRPOTrainer(
        str(arguments.model),
        inputs.rewards,
        args=config_of(spec, arguments.run_dir, arguments.attempt_dir, arguments.server),
        train_dataset=inputs.train,
        eval_dataset=inputs.evaluation,
        peft_config=lora_of(spec),
        tools=inputs.tools,
        environment_factory=inputs.environment,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_progress_callback())
    return trainer


def config_of(spec: RunSpec, run_dir: Path, attempt_dir: Path, server_urls: list[str]) -> AsyncGRPOConfig:
    """AsyncGRPOConfig of a RunSpec."""
    import torch

    from trainer_core.config import AsyncGRPOConfig

    rollout, training = spec.rollout, spec.training
    budget = spec.server.max_model_len if training.token_budget is None else training.token_budget
    return AsyncGRPOConfig(
        output_dir=str(run_dir / CHECKPOINTS),
        attempt_dir=str(attempt_dir),
        run_name=f"{spec.name} {run_dir.name[:8]}",  # names of runs need not be unique, and some trackers merge by name
        report_to=spec.exporters.targets or "none",
        project=spec.exporters.project,
        disable_tqdm=True,
        seed=training.seed,
        data_seed=spec.data.seed,
        train_sampling_strategy="random" if spec.data.shuffle else "sequential",
        dtype=spec.model.dtype,
        trust_remote_code=spec.model.trust_remote_code,
        bf16=training.bf16,
        gradient_checkpointing=training.gradient_checkpointing,
        attention_backend=None if training.attention_backend == "auto" else training.attention_backend,
        compile_layers=training.compile_layers,
        router_aux_loss_coef=training.router_aux_loss_coef,
        use_cpu=not torch.cuda.is_available(),
        ddp_timeout=COLLECTIVE_DEADLINE_S,
        # rollouts
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        max_staleness=rollout.max_staleness,
        max_concurrent_rollouts=rollout.max_concurrent_rollouts,
        queue_maxsize=rollout.queue_maxsize,
        reward_timeout=rollout.reward_timeout,
        max_generation_failures=rollout.max_generation_failures,
        heartbeat_stale_after_s=rollout.heartbeat_stale_after_s,
        max_tool_calling_iterations=spec.agent.max_tool_calling_iterations,
        tool_timeout=spec.agent.tool_timeout,
        fork_threshold_tokens=spec.agent.fork_threshold_tokens,
        chat_template_kwargs=spec.agent.chat_template_kwargs or None,
        reward_weights=[reward.weight for reward in spec.rewards],
        vllm_server_base_url=server_urls,
        vllm_server_timeout=spec.server.startup_timeout,  # a server that died is started again meanwhile
        request_timeout=spec.server.request_timeout,
        weight_sync_timeout=spec.server.weight_sync_timeout,
        # the step
        max_steps=training.max_steps,
        max_epochs=training.max_epochs,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        token_budget=budget,
        loss_type=training.loss_type,
        scale_rewards=training.scale_rewards,
        epsilon=training.epsilon,
        epsilon_high=training.epsilon_high,
        beta=training.beta,
        score_centering=training.score_centering,
        num_sampler_logprobs=training.num_sampler_logprobs,
        max_grad_norm=training.max_grad_norm,
        adam_beta2=training.adam_beta2,
        weight_decay=training.weight_decay,
        mask_truncated_completions=training.mask_truncated_completions,
        vllm_importance_sampling_clip_min=training.importance_sampling_min,
        vllm_importance_sampling_clip_max=training.importance_sampling_max,
        weight_sync_steps=training.weight_sync_steps,
        eval_steps=spec.evaluation.every_steps,
        eval_num_generations=spec.evaluation.num_generations,
        eval_at_start=spec.evaluation.at_start,
        eval_temperature=spec.evaluation.temperature,
        eval_top_p=spec.evaluation.top_p,
        eval_pass_above=spec.evaluation.pass_above,
        save_strategy="steps",
        save_steps=spec.checkpoints.save_steps,
        save_total_limit=spec.checkpoints.save_total_limit,
        metric_for_best_model=spec.checkpoints.keep_best_by,
    )


def lora_of(spec: RunSpec) -> Any:
    """LoraConfig of a RunSpec; None for full training."""
    from peft import LoraConfig

    if not spec.lora.enabled:
        return None
    names = spec.lora.target_modules.strip()
    targets = names if names == "all-linear" else [name.strip() for name in names.split(",") if name.strip()]
    return LoraConfig(
        r=spec.lora.r,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer_core.launch", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="the run's RunSpec, as YAML")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run: rewards and checkpoints")
    parser.add_argument("--attempt-dir", type=Path, required=True, help="folder of the attempt: control file and spool")
    parser.add_argument("--model", required=True, help="folder or hub id of the model, as the server serves it")
    parser.add_argument("--server", action="append", required=True, help="URL of a vLLM server; repeat for replicas")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", type=Path, help="checkpoint folder to continue from")
    begin.add_argument("--start-from", type=Path, help="folder of weights, or of an adapter, that step 0 begins with")
    return parser


def _read_spec(path: Path) -> RunSpec:
    if not path.is_file():
        raise ValueError(f"the spec {path} does not exist")
    return RunSpec.from_yaml(path.read_text())


def _check_model(model: str) -> None:
    """A path must be a model folder; anything else is a hub id, which the loader checks."""
    path = Path(model)
    looks_local = path.is_absolute() or model.startswith((".", "~")) or path.exists()
    if looks_local and not (path.expanduser() / "config.json").is_file():
        raise ValueError(
            f"model {model} does not exist or has no config.json; give a Hugging Face model folder or a hub id"
        )


def _check_checkpoint(folder: Path) -> None:
    from trainer_core.checkpoint import load_rollout_state

    load_rollout_state(folder)


def _set_threads() -> None:
    """One thread on a CPU, where the server shares the cores and threads of both would wait for one another."""
    import torch

    threads = os.environ.get("OFFBEAT_TORCH_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))
    elif not torch.cuda.is_available():
        torch.set_num_threads(1)


def progress_line(step: int, max_steps: int, logs: Mapping[str, float]) -> str:
    """One line of trainer.log. A metric without a value in this step, as reward when nothing was scored, is a dash."""

    def number(name: str, form: str) -> str:
        return format(logs[name], form) if name in logs else "-"

    return (
        f"step {step}/{max_steps} reward {number('reward', '.3f')} loss {number('loss', '+.4f')} kl {number('kl', '.4f')} "
        f"staleness {number('sample/staleness_mean', '.1f')} {number('perf/step_s', '.1f')} s "
        f"(waited {number('perf/rollout_wait_s', '.1f')} s, computed {number('perf/fwd_bwd_s', '.1f')} s)"
    )


def _progress_callback() -> Any:
    """Prints one line a step."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "perf/step_s" in logs:
                line = progress_line(state.global_step, state.max_steps, logs)
                print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    return Progress()


def _limit_exit(code: int) -> None:
    """End the process although a library does not: some trackers wait at the exit for a server that is not there."""
    watch = threading.Timer(EXIT_S, os._exit, (code,))
    watch.daemon = True
    watch.start()


if __name__ == "__main__":
    exit_code = main()
    _limit_exit(exit_code)
    sys.exit(exit_code)
