"""AsyncGRPOTrainer: the training side.

Generation runs in another process (trainer_core.rollout). What happens here, step after step:

    pull samples -> drop stale ones -> plan rows -> forward, backward, optimizer -> push weights -> report -> checkpoint

transformers.Trainer owns the loop, the optimizer, the schedule and the callbacks. `get_batch_samples` is where a step
begins, `compute_loss` is its inside, `_maybe_log_save_evaluate` is where it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Trainer, TrainerCallback, set_seed
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import TrainOutput

from trainer_core import distributed, distributed_checkpoint, distributed_fsdp, evaluation, parity
from trainer_core.adapters import changes_base
from trainer_core.attention.backends import choose_backend
from trainer_core.attention.interface import uses_softcap
from trainer_core.checks import RewardFunc, check_arguments, check_router, reward_list
from trainer_core.compiled import compile_layers
from trainer_core.config import AsyncGRPOConfig
from trainer_core.exporters import Exporters
from trainer_core.families import adapt_text_only, router_loss
from trainer_core.flops import FlopCounter, peak_flops
from trainer_core.generation import Generation, check_picklable
from trainer_core.loss import LossSettings, StepTotals, policy_loss
from trainer_core.model import install_scoring, load_policy
from trainer_core.packing.collator import PackedRow
from trainer_core.report import Moment, StepReport, scored_positions
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.streams import is_stream, rows_in
from trainer_core.row_loss import loss_inputs
from trainer_core.saving import CheckpointKeeper
from trainer_core.spool import ROLLOUTS_FILE, SPOOL_FILE, Spool
from trainer_core.step_plan import RankPlan, StepPlan
from trainer_core.sync.gathering import take_part
from trainer_core.token_log import TokenLog, TokenTexts


class AsyncGRPOTrainer(Trainer):
    """Trains a causal language model with asynchronous GRPO against one or more vLLM servers.

    `model` is a folder or a hub id. Reward functions, tools and `environment_factory` run in another process, so they must
    be picklable: module-level functions, partials of them or callable instances. Everything that can be checked is
    checked before the model loads; errors are TypeError, ValueError or NotImplementedError with one sentence.
    """

    args: AsyncGRPOConfig
    model: Any
    train_dataset: Any
    processing_class: Any
    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop
    # The loss is normalised over the whole step here, so Trainer must not divide by the micro-batches again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Callable[..., Any] | None = None,
    ) -> None:
        args = args or AsyncGRPOConfig(output_dir="trainer_output")
        check_arguments(model, eval_dataset, train_dataset, peft_config, args)
        self.model_path = model
        self.reward_funcs = reward_list(reward_funcs, args)
        self._worker_arguments: dict[str, Any] = {
            "config": args,
            "loop_cls": self.loop_cls,
            "model_path": model,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "reward_funcs": self.reward_funcs,
            "reward_weights": args.reward_weights or [1.0] * len(self.reward_funcs),
            "tools": tools,
            "environment_factory": environment_factory,
            "rollouts_path": args.attempt_path / ROLLOUTS_FILE,
        }
        if args.process_index == 0:
            check_picklable(self._worker_arguments)
        self.ranks = distributed.connect(args.process_index, args.world_size, args.heartbeat_stale_after_s)
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        set_seed(args.seed)  # new weights, as those of an adapter, are the same on all ranks
        policy = _load(model, args)
        check_router(policy.config, args)
        if peft_config is not None:
            policy = get_peft_model(policy, adapt_text_only(peft_config, policy))
        install_scoring(policy)
        if args.compile_layers:
            compile_layers(policy)
        if distributed_fsdp.wanted(args) and peft_config is None:
            # Whole gradients of all weights would take what sharding saves; those of an adapter are small.
            assert isinstance(args.accelerator_config, AcceleratorConfig)  # transformers makes one of what it is given
            args.accelerator_config.gradient_accumulation_kwargs = {"sync_each_batch": True}
        targets, args.report_to = list(args.report_to or []), []  # what an exporter raises must not end training
        super().__init__(
            model=policy,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), Exporters(targets, self.event), _StepClock(self)],
            optimizers=optimizers,
        )
        args.report_to = targets
        self.reference = self._make_reference() if args.beta > 0 else None
        router_coefficient, self.experts_per_token = router_loss(policy.config, args.router_aux_loss_coef)
        self.settings = LossSettings(
            loss_type=args.loss_type,
            epsilon=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            clip_min=args.vllm_importance_sampling_clip_min,
            clip_max=args.vllm_importance_sampling_clip_max,
            beta=args.beta,
            score_centering=args.score_centering,
            max_completion_length=args.max_completion_length,
            router_aux_loss_coef=router_coefficient,
        )
        self.flops = FlopCounter.of(policy)
        self.peak = peak_flops(args.device, bool(args.bf16 or args.fp16))
        precision = getattr(torch, args.compute_dtype)
        self.backend = choose_backend(args.device, precision, uses_softcap(policy.config), args.attention_backend)
        self.report = StepReport(args.device)
        self.rollout_state = RolloutState()
        self.spool = Spool(args.attempt_path / SPOOL_FILE) if self.is_world_process_zero() else None
        self.rollout_spool = Spool(args.attempt_path / ROLLOUTS_FILE) if self.is_world_process_zero() else None
        self.token_log = TokenLog(TokenTexts(processing_class))
        self.ranks.lost = self._rank_lost
        self.generation: Generation | None = None
        self.checkpoints = CheckpointKeeper(self)
        self._plan = StepPlan([], StepTotals(0, 0))
        self._resumed = False
        self._stepped = False
        self._last_ended = 0

    def _make_reference(self) -> Any:
        """What the KL term compares with: the base model under the adapter, or a frozen copy of what was loaded."""
        if isinstance(self.model, PeftModel) and not changes_base(self.model):
            return self.model
        reference = _load(self.model_path, self.args).eval().requires_grad_(False)
        install_scoring(reference)
        if self.is_fsdp_enabled:
            return distributed_fsdp.shard_frozen(self.accelerator, reference)
        return reference.to(self.args.device)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        if distributed_fsdp.wanted(self.args):
            kwargs["fsdp_plugin"] = distributed_fsdp.plugin(self.args, kwargs.get("fsdp_plugin"))
            self._fsdp_plugin = kwargs["fsdp_plugin"]
        return super()._build_accelerator_args(**kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if distributed_fsdp.wanted(self.args):
            distributed_fsdp.enable_on_cpu(self.accelerator, self._fsdp_plugin)
            self.is_fsdp_enabled = True

    def _rank_lost(self, text: str) -> None:
        """Another rank is gone, and this process ends: say why where the run's page reads it."""
        self.event("error", "failed", text, kind="RankLost")

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:  # type: ignore[override]
        """Train until max_steps, or until num_train_epochs of prompts are done. Continues from a checkpoint folder.

        Raises RolloutWorkerError when generation failed for good, ValueError when the folder is no checkpoint.
        """
        folder = self.checkpoints.to_resume(resume_from_checkpoint)
        self._resumed = folder is not None
        if folder is not None and self.is_fsdp_enabled and not distributed_checkpoint.has_shards(folder):
            self._load_whole(str(folder))
        try:
            output_of_training = super().train(resume_from_checkpoint=None if folder is None else str(folder), **kwargs)
        finally:
            self._stop_generation()
        self.ranks.close()
        return output_of_training

    def start_generation(self) -> None:
        """Called when model and optimizer stand: connect to the servers, bring them up to date, start the worker."""
        self._last_ended = self.state.global_step
        self.checkpoints.last_step = self.state.global_step if self._resumed else -1
        if self.state.global_step >= self.state.max_steps:
            return  # a finished run was resumed
        if not self.ranks.leads:
            self._follow()
            return
        self.generation = Generation(
            self._worker_arguments,
            config=self.args,
            model=self.model,
            state=self.rollout_state,
            prompts_wanted=self._prompts_wanted(),
            pair_cost=self.flops.pair_cost,
            report=self.report,
            event=self.event,
        )
        summon = partial(self.ranks.call, "gather") if self.is_fsdp_enabled else None
        self.generation.open(resumed=self._resumed, attention=self.backend, summon=summon)
        self.ranks.release()
        self.report.restart()

    def _follow(self) -> Any:
        """On ranks other than 0: take part in what rank 0 calls for until it gives a value, and return that."""
        return self.ranks.follow({"gather": partial(take_part, self.model)})

    def _stop_generation(self) -> None:
        if self.generation is not None:
            self.generation.stop()
            if self.spool is not None and (late := self.report.late_totals()):
                self.spool.metrics(self.state.global_step, late)

    @property
    def _leading(self) -> Generation:
        """Generation while it runs, on the rank that leads."""
        assert self.generation is not None
        return self.generation

    def _prompts_wanted(self) -> float:
        epochs = self.args.num_train_epochs if self.args.max_steps <= 0 else self.args.max_epochs
        return float("inf") if epochs is None else epochs * rows_in(self.train_dataset)

    @property
    def stop_order(self) -> str | None:
        """The order of the control file that ended training, if one did."""
        return None if self.generation is None else self.generation.intake.order

    # ---- a step begins: samples to rows -----------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Nothing: steps come from the rollout queue, through `get_batch_samples`."""
        return []  # type: ignore[return-value]

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """One endless epoch. It ends by max_steps, or when every prompt is done."""
        max_steps = args.max_steps if args.max_steps > 0 else sys.maxsize
        samples = args.samples_per_step
        batches = max_steps * args.gradient_accumulation_steps
        rows = samples * max_steps if is_stream(self.train_dataset) else len(self.train_dataset)
        return 1, max_steps, rows, samples * max_steps, samples, batches, max_steps

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """This rank's rows of the next optimizer step, and what the loss is divided by."""
        part = self._own_part()
        if not part.rows:
            self.control.should_training_stop = True
            self.control.should_save = part.save and self.checkpoints.last_step != self.state.global_step
        rows = zip(part.rows, part.first_samples, strict=True)
        batches = [{"row": row, "first_sample": first, "logged": part.logged} for row, first in rows]
        return batches, part.totals

    def _own_part(self) -> RankPlan:
        """This rank's part of the next step. Rank 0 makes the plan, and gives each of the others its own."""
        if not self.ranks.leads:
            part: RankPlan = self._follow()
            return part
        self._plan = self._leading.planner.next()
        parts = [self._plan.of_rank(rank) for rank in range(self.ranks.size)]
        if self.ranks.size > 1:
            with self.report.timed("perf/dispatch_s"):
                self.report.add("perf/dispatch_mib", self.ranks.give(parts) / 2**20)
        return parts[0]

    # ---- inside a step ----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        with self.report.timed_on_device("perf/fwd_bwd_s"):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The share of this rank's row in the step's loss. `num_items_in_batch` holds the step's totals."""
        row: PackedRow = inputs["row"]
        with self.report.timed_on_device("perf/fwd_s"):
            terms = loss_inputs(
                model,
                row,
                device=self.args.device,
                backend=self.backend,
                temperature=self.args.temperature,
                weight_version=self.rollout_state.weight_version,
                reference=self.reference,
                experts_per_token=self.experts_per_token,
            )
            loss, metrics = policy_loss(terms, self.settings, num_items_in_batch)
        if row.terms:
            if self.state.global_step == 0 and not row.weight_versions.any():
                gap = (terms.log_probs.detach() - terms.old_log_probs).abs().max()
                metrics["sampling/step0_max_abs_diff"] = gap
            self.report.add_row(loss.detach(), metrics)
            self.token_log.add(inputs["first_sample"], terms, self.settings, inputs["logged"])
        # Data parallelism averages gradients over ranks, and the totals are those of all ranks.
        return loss * self.args.world_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        row: PackedRow = inputs["row"]
        pairs = self.flops.pairs(row.layout.position_ids)
        return int(self.flops.total(row.tokens, pairs, scored_positions(row)))

    # ---- a step ends ------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """Trainer calls this after each optimizer step, and once more when the loop ends."""
        if self.state.global_step > self._last_ended:
            self._last_ended = self.state.global_step
            self._end_step(float(grad_norm), kwargs["learning_rate"])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _end_step(self, grad_norm: float, learning_rate: float) -> None:
        """Count the step's prompts as done, push weights, and write the step's metrics."""
        step = self.state.global_step
        self._collect_values()
        if self.rollout_spool is not None:
            for record in self.token_log.lines(self._leading.planner.samples, self.rollout_state.weight_version):
                self.rollout_spool.trained(step, record)
        if self.is_world_process_zero():
            for sample in self._leading.planner.samples:
                self._leading.intake.finish(sample)
            self.state.epoch = self.rollout_state.prompts_done() / rows_in(self.train_dataset)
        if step % self.args.weight_sync_steps == 0:
            self.rollout_state.weight_version += 1
            with self.report.timed("perf/weight_sync_s"):
                if self.ranks.leads:
                    self._leading.push()
                    self.ranks.release()
                else:
                    self._follow()
        if self.spool is None:
            return
        self.report.add("grad_norm", grad_norm)
        self.report.add("learning_rate", learning_rate)
        self.report.add("epoch", self.state.epoch or 0.0)
        values = self.report.finish(self._plan.rows, self.flops, self.peak, self.args.world_size)
        self.spool.metrics(step, values)
        if self.args.log_completions:
            self._print_completions(step)
        if not self._stepped:
            self._stepped = True
            self.event("info", "first_step", f"First optimizer step after {values['perf/step_s']:.0f} s.")
            if text := parity.warning(values, self.args.compute_dtype, self._leading.served_dtype):
                self.event("warning", "parity", text)

    def _collect_values(self) -> None:
        """Bring what the ranks know of their rows together on rank 0, which waits for them here."""
        own = self.report.take_rows(), self.token_log.take()
        if not self.ranks.leads:
            self.ranks.hand_in(own)
            return
        with self.report.timed("perf/weight_sync_barrier_s"):
            rows, tokens = zip(*self.ranks.collect(own, self.args.ddp_timeout), strict=True)
        self.report.add_ranks(rows)
        self.token_log.add_ranks(tokens)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # type: ignore[override]
        """Let the rollout worker evaluate the weights of this step; training goes on when it is done.

        Returns the metrics by the names that transformers compares, eval_reward and so on. Only during `train`.
        """
        if self.ranks.leads and self.generation is None:
            raise RuntimeError("evaluation needs the servers and the rollout worker, so it works only during train()")
        step = self.state.global_step
        if self.generation is not None:  # the leading rank has it
            found = evaluation.evaluate(self.generation.worker, self.generation.intake, step, self.event)
            self.ranks.give([found] * self.ranks.size)
        else:
            found = self._follow()
        if self.spool is not None:
            self.spool.metrics(step, found)
        self.report.restart()
        metrics = {name.replace("/", "_"): value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _print_completions(self, step: int) -> None:
        for sample in self._leading.planner.samples[: self.args.num_completions_to_print]:
            text = self.processing_class.decode(sample.input_ids[sample.completion_mask.astype(bool)])
            print(f"step {step} reward {sample.reward:.3f} advantage {sample.advantage:+.3f}: {text!r}", flush=True)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's own log line, with every metric since the last one."""
        if "loss" in logs:  # not the summary at the end
            logs = {**logs, **self.report.log.flush()}
        super().log(logs, start_time)

    # ---- checkpoints: hooks of transformers, see trainer_core.saving -------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model or adapter as others load it."""
        if self.is_fsdp_enabled:
            self.checkpoints.save_gathered(Path(str(output_dir or self.args.output_dir)))
        else:
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.checkpoints.writing():
            super()._save_checkpoint(model, trial)

    def _get_output_dir(self, trial: Any) -> str:
        staging = self.checkpoints.staging
        return super()._get_output_dir(trial) if staging is None else str(staging)

    def _load_whole(self, folder: str) -> None:
        """Weights or adapter of a checkpoint without shards, into the model that is still whole on every rank."""
        self.is_fsdp_enabled = False
        try:
            super()._load_from_checkpoint(folder)
        finally:
            self.is_fsdp_enabled = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Trainer calls this for a sharded model, or for a whole one."""
        if not self.is_fsdp_enabled or distributed_checkpoint.has_shards(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        best = self.checkpoints.has_value(metrics) and super()._determine_best_metric(metrics, trial)
        if best:
            self.checkpoints.note_best(metrics)
        return best

    def event(self, level: Any, name: str, text: str, **data: Any) -> None:
        """Tell the run's page something; data goes with it. Only the leading rank writes."""
        if self.spool is not None:
            self.spool.event(self.state.global_step, level, name, text, **data)


class _StepClock(TrainerCallback):
    """What the trainer does at moments that only callbacks see."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self._trainer = trainer
        self._started: Moment = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.start_generation()
        if self._trainer.args.eval_at_start and not self._trainer.state.global_step:
            self._trainer.evaluate()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._started = self._trainer.report.moment()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.report.add_span("perf/optimizer_s", self._started)


def _load(path: str, args: AsyncGRPOConfig) -> Any:
    kwargs: Any = args.model_init_kwargs
    return load_policy(path, dtype=args.dtype, trust_remote_code=args.trust_remote_code, init_kwargs=kwargs)
