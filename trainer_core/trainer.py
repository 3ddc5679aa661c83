"""AsyncGRPOTrainer: the training side.

Generation runs in another process (trainer_core.rollout). What happens here, step after step:

    pull samples -> drop stale ones -> plan rows -> forward, backward, optimizer -> push weights -> report -> checkpoint

transformers.Trainer owns the loop, the optimizer, the schedule and the callbacks. `get_batch_samples` is where a step
begins, `compute_loss` is its inside, `_maybe_log_save_evaluate` is where it ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from trainer_core import checkpoint
from trainer_core.attention.interface import choose_backend
from trainer_core.config import AsyncGRPOConfig
from trainer_core.flops import FlopCounter, peak_flops
from trainer_core.intake import CONTROL_FILE, SampleIntake
from trainer_core.loss import LossInputs, LossSettings, StepTotals, policy_loss
from trainer_core.model import ScoreRequest, install_scoring, load_policy, score_row
from trainer_core.packing.collator import PackedRow, collate
from trainer_core.packing.planner import BudgetPlanner, PackItem, RowPlan, plan_fixed
from trainer_core.report import StepReport
from trainer_core.rollout.loop import AsyncRolloutLoop
from trainer_core.rollout.messages import ServersReady, WeightsPushed
from trainer_core.rollout.state import RolloutState
from trainer_core.rollout.types import RolloutSample
from trainer_core.rollout.worker import RolloutWorker
from trainer_core.spool import ROLLOUTS_FILE, SPOOL_FILE, Spool
from trainer_core.sync import ServerUnreachable, choose_sync
from trainer_core.sync.server_api import ServerApi

RewardFunc = Callable[..., Any]


@dataclass
class StepPlan:
    """One optimizer step: `micro_batches[i][rank]` is a row. Empty when training ends; `save` asks for a checkpoint."""

    micro_batches: list[list[PackedRow]]
    totals: StepTotals
    save: bool = False

    @property
    def rows(self) -> list[PackedRow]:
        return [row for micro_batch in self.micro_batches for row in micro_batch]


class AsyncGRPOTrainer(Trainer):
    """Trains a causal language model with asynchronous GRPO against one or more vLLM servers.

    `model` is a folder or a hub id. Reward functions, tools and `environment_factory` run in another process, so they must
    be picklable: module-level functions, partials of them or callable instances. Everything that can be checked is
    checked before the model loads; errors are TypeError, ValueError or NotImplementedError with one sentence.
    """

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
        if not isinstance(model, str):
            raise TypeError(f"model is a {type(model).__name__}; give a path or hub id, the server loads it too")
        if eval_dataset is not None:
            raise NotImplementedError("eval_dataset is not supported yet; leave it None")
        self.reward_funcs = _as_list(reward_funcs)
        _check_rewards(self.reward_funcs, args, environment_factory)
        _check_dataset(train_dataset)
        assert train_dataset is not None
        self.model_path = model
        self._worker_arguments = {
            "config": args,
            "loop_cls": self.loop_cls,
            "model_path": model,
            "train_dataset": train_dataset,
            "reward_funcs": self.reward_funcs,
            "reward_weights": args.reward_weights or [1.0] * len(self.reward_funcs),
            "tools": tools,
            "environment_factory": environment_factory,
            "rollouts_path": args.attempt_path / ROLLOUTS_FILE,
        }
        if args.process_index == 0:
            RolloutWorker(**self._worker_arguments, state=None).check_picklable()

        policy: Any = self._load(args)
        self.reference = self._load(args).eval() if args.beta > 0 and peft_config is None else None
        if peft_config is not None:
            policy = get_peft_model(policy, _check_adapter(peft_config))
        _check_router(policy, args)
        install_scoring(policy)
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        super().__init__(
            model=policy,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=[*(callbacks or []), _StepClock(self)],
            optimizers=optimizers,
        )
        if self.reference is not None:
            install_scoring(self.reference.requires_grad_(False).to(args.device))
        self.settings = LossSettings(
            args.loss_type,
            args.epsilon,
            args.epsilon_high or args.epsilon,
            args.vllm_importance_sampling_clip_min,
            args.vllm_importance_sampling_clip_max,
            args.beta,
            args.score_centering,
            args.max_completion_length,
        )
        self.num_top = args.num_sampler_logprobs if args.score_centering else 0
        self.flops = FlopCounter.of(policy)
        self.peak = peak_flops(args.device, args.bf16 or args.fp16)
        self.backend = choose_backend(args.device)
        self.report = StepReport(args.device)
        self.rollout_state = RolloutState()
        self.spool = Spool(args.attempt_path / SPOOL_FILE) if self.is_world_process_zero() else None
        self._carried: PackItem | None = None
        self._plan = StepPlan([], StepTotals(0, 0))
        self._pending: list[RolloutSample] = []
        self._row_metrics: list[tuple[str, float | tuple[float, float]]] = []
        self._loss = 0.0
        self._staging: Path | None = None
        self._resumed = False
        self._stepped = False
        self._servers_restored = 0
        self._last_saved = -1
        self._last_ended = 0

    def _load(self, args: AsyncGRPOConfig) -> Any:
        return load_policy(
            self.model_path,
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
            init_kwargs=args.model_init_kwargs,  # type: ignore[arg-type]
        )

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:  # type: ignore[override]
        """Train until max_steps, or until num_train_epochs of prompts are done. Continues from a checkpoint folder.

        Raises RolloutWorkerError when generation failed for good.
        """
        if resume_from_checkpoint:
            folder = Path(str(resume_from_checkpoint))
            self.rollout_state = checkpoint.load_rollout_state(folder)
        if self.is_world_process_zero():
            checkpoint.remove_leftovers(Path(str(self.args.output_dir)))
        self._resumed = bool(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self._stop_generation()

    def start_generation(self) -> None:
        """Called when model and optimizer stand: connect to the servers, bring them up to date, start the worker."""
        self._last_ended = self.state.global_step
        self._last_saved = self.state.global_step if self._resumed else -1
        if self.state.global_step >= self.state.max_steps:
            return  # a finished run was resumed
        if not self.is_world_process_zero():
            return
        self._event("info", "started", "Training started.", resumed=self._resumed)
        self._look_at_server()
        self.sync = choose_sync(config=self.args, model=self.model, server_urls=self.args.server_urls)
        self.sync.open()
        self.worker = RolloutWorker(**self._worker_arguments, state=self.rollout_state)
        if self._resumed:
            self.sync.push(self.model, self.rollout_state.weight_version)
        self.intake = SampleIntake(
            self.worker,
            state=self.rollout_state,
            max_staleness=self.args.max_staleness,
            prompts_wanted=self._prompts_wanted(),
            control_path=self.args.attempt_path / CONTROL_FILE,
            spool=self.spool,
            metrics=lambda: self.report.buffers,
            server_back=self._server_back,
        )
        self.intake.step = self.state.global_step
        self.worker.start()
        if self._resumed:
            self._announce_weights()

    @property
    def stop_order(self) -> str | None:
        """The order of the control file that ended training, if one did."""
        intake = getattr(self, "intake", None)
        return None if intake is None else intake.order

    def _stop_generation(self) -> None:
        if (worker := getattr(self, "worker", None)) is not None:
            worker.stop()
        if (sync := getattr(self, "sync", None)) is not None:
            sync.close()

    def _prompts_wanted(self) -> float:
        if self.args.max_steps > 0:
            return float("inf")
        return self.args.num_train_epochs * len(self.train_dataset)

    # ---- a step begins: samples to rows -----------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Nothing: steps come from the rollout queue, through `get_batch_samples`."""
        return []  # type: ignore[return-value]

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """One endless epoch. It ends by max_steps, or when every prompt is done."""
        max_steps = args.max_steps if args.max_steps > 0 else sys.maxsize
        samples = args.samples_per_step
        batches = max_steps * args.gradient_accumulation_steps
        return 1, max_steps, len(self.train_dataset), samples * max_steps, samples, batches, max_steps

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """This rank's micro-batches of the next optimizer step, and what the loss is divided by."""
        self._plan = self._share(self._next_plan(num_batches) if self.is_world_process_zero() else None)
        if not self._plan.micro_batches:
            self.control.should_training_stop = True
            self.control.should_save = self._plan.save and self._last_saved != self.state.global_step
        rank = self.args.process_index
        return [{"row": micro_batch[rank]} for micro_batch in self._plan.micro_batches], self._plan.totals

    def _next_plan(self, num_batches: int) -> StepPlan:
        """Pull samples, drop what cannot be trained on, and lay the rest out as rows."""
        plans: list[list[RowPlan]] = []
        for _ in range(num_batches):
            if not (micro_batch := self._fill_micro_batch()):
                break
            plans.append(micro_batch)
        if self.intake.order is not None or not plans:
            return StepPlan([], StepTotals(0, 0), save=self.intake.order != "stop")
        with self.report.timed("perf/planner_s"):
            # A last step may be short; ranks still take part in every micro-batch, with rows of nothing.
            plans += [plan_fixed([], self.args.world_size, 0.0) for _ in range(num_batches - len(plans))]
            micro_batches = [[collate(row, self.num_top) for row in micro_batch] for micro_batch in plans]
        items = [item for micro_batch in plans for row in micro_batch for item in row.items]
        self._pending = [item.sample for item in items]
        self.report.add_samples(self._pending)
        self.report.add_rows(micro_batches, None if self.args.fixed_batch else self.args.token_budget)
        self.report.add("batch/groups_per_step", len({sample.group_id for sample in self._pending}))
        return StepPlan(micro_batches, StepTotals(sum(item.terms for item in items), len(items)))

    def _fill_micro_batch(self) -> list[RowPlan]:
        """One row for each rank; empty when there are no more samples."""
        ranks = self.args.world_size
        if self.args.fixed_batch:
            items: list[PackItem] = []
            while len(items) < self.args.per_device_train_batch_size * ranks and (item := self._next_item()) is not None:
                items.append(item)
            with self.report.timed("perf/planner_s"):
                return plan_fixed(items, ranks, self.flops.pair_cost) if items else []
        assert self.args.token_budget is not None
        planner = BudgetPlanner(ranks, self.args.token_budget, self.flops.pair_cost)
        while (item := self._carried or self._next_item()) is not None:
            self._carried = None
            with self.report.timed("perf/planner_s"):
                if planner.oversize(item):
                    self._drop_oversize(item)
                elif not planner.add(item):
                    self._carried = item
                    break
        return planner.rows if any(row.items for row in planner.rows) else []

    def _next_item(self) -> PackItem | None:
        """The next sample with something to train; None when training ends."""
        while (sample := self.intake.next()) is not None:
            masked = self.args.mask_truncated_completions and sample.truncated
            item = None if masked else PackItem.of(sample)
            if item is not None:
                return item
            self.intake.finish(sample)
        return None

    def _drop_oversize(self, item: PackItem) -> None:
        self.report.add("batch/dropped_oversize_total", 1.0)
        self.intake.finish(item.sample)
        text = (
            f"A sample of {len(item.keys)} tokens was dropped: token_budget is {self.args.token_budget}. "
            "Raise token_budget, or lower max_completion_length."
        )
        self._event("warning", "sample_dropped", text)

    def _share(self, plan: StepPlan | None) -> StepPlan:
        """Send the plan of rank 0 to all ranks."""
        if self.args.world_size == 1:
            assert plan is not None
            return plan
        return broadcast_object_list([plan])[0]

    # ---- inside a step ----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        with self.report.timed("perf/fwd_bwd_s"):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The share of this rank's row in the step's loss."""
        row: PackedRow = inputs["row"]
        totals: StepTotals = num_items_in_batch
        with self.report.timed("perf/fwd_s"):
            loss_inputs = self._loss_inputs(model, row)
            loss, metrics = policy_loss(loss_inputs, self.settings, totals)
        self._record(metrics, loss, loss_inputs, row)
        # Data parallelism averages gradients over ranks, and the totals are those of all ranks.
        return loss * self.args.world_size

    def _loss_inputs(self, model: Any, row: PackedRow) -> LossInputs:
        device = self.args.device
        positions, first, owner = np.unique(row.token_index, return_index=True, return_inverse=True)
        if not row.terms:
            positions, first = np.zeros(1, np.int64), np.zeros(1, np.int64)  # filler: forwarded, no term
        targets = row.target_ids[first] if row.terms else np.zeros(1, np.int64)
        order = np.argsort(owner, kind="stable")  # the scorer wants terms in the order of positions
        at = torch.from_numpy(positions).to(device)
        request = ScoreRequest(
            torch.from_numpy(targets).to(device),
            torch.from_numpy(row.top_ids[order]).to(device),
            torch.from_numpy(owner[order]).to(device),
            self.args.temperature,
        )
        scores = score_row(model, row.layout, at, request, self.backend)
        ref_log_probs = self._ref_log_probs(row, at, request) if self.settings.beta > 0 else None

        def move(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return LossInputs(
            # A filler row has no term; its zero-weight score keeps the row in the graph.
            log_probs=scores.log_probs[request.owner] if row.terms else scores.log_probs[:0],
            old_log_probs=move(row.old_log_probs[order]),
            sample_index=move(row.sample_index[order]),
            advantages=move(row.advantages),
            fresh=move(row.weight_versions == self.rollout_state.weight_version),
            entropy=scores.entropy[request.owner],
            top_log_probs=scores.top_log_probs,
            sampler_top_log_probs=move(row.top_log_probs[order]),
            ref_log_probs=None if ref_log_probs is None else ref_log_probs[request.owner],
        )

    @torch.no_grad()
    def _ref_log_probs(self, row: PackedRow, at: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
        """Reference log-probabilities at the scored positions: the base model under LoRA, else a frozen copy."""
        if self.reference is not None:
            return score_row(self.reference, row.layout, at, request, self.backend).log_probs
        assert isinstance(self.model, PeftModel)
        with self.model.disable_adapter():
            return score_row(self.model, row.layout, at, request, self.backend).log_probs

    def _record(self, metrics: dict[str, Any], loss: torch.Tensor, inputs: LossInputs, row: PackedRow) -> None:
        """Keep the row's metric values; one transfer from the device for all of them."""
        if not row.terms:
            return
        if self.state.global_step == 0 and not row.weight_versions.any():
            gap = (inputs.log_probs.detach() - inputs.old_log_probs).abs().max()
            metrics["sampling/step0_max_abs_diff"] = gap
        self._loss += float(loss.detach())
        pairs = {name: value if isinstance(value, tuple) else (value,) for name, value in metrics.items()}
        numbers = iter(torch.stack([part.float() for pair in pairs.values() for part in pair]).tolist())
        for name, pair in pairs.items():
            self._row_metrics.append((name, next(numbers) if len(pair) == 1 else (next(numbers), next(numbers))))

    # ---- a step ends ------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """Trainer calls this after each optimizer step, and once more when the loop ends."""
        if self.state.global_step > self._last_ended:
            self._last_ended = self.state.global_step
            self._end_step(grad_norm, kwargs["learning_rate"])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _end_step(self, grad_norm: Any, learning_rate: float) -> None:
        """Push weights, count the step's prompts as done, and write its metrics."""
        step = self.state.global_step
        self._collect_from_ranks()
        if self.is_world_process_zero():
            self.intake.step = step
            for sample in self._pending:
                self.intake.finish(sample)
            self.state.epoch = self.rollout_state.prompts_done() / len(self.train_dataset)
        if step % self.args.weight_sync_steps == 0:
            self.rollout_state.weight_version += 1
            with self.report.timed("perf/weight_sync_s"):
                self._push()
        if not self.is_world_process_zero():
            return
        self.report.add("loss", self._loss)
        self.report.add("grad_norm", float(grad_norm))
        self.report.add("learning_rate", learning_rate)
        self.report.add("epoch", self.state.epoch)
        values = self.report.finish(self._plan.rows, self.flops, self.peak, self.args.world_size)
        assert self.spool is not None
        self.spool.metrics(step, values)
        if self.args.log_completions:
            self._print_completions(step)
        if not self._stepped:
            self._stepped = True
            self._event("info", "first_step", f"First optimizer step after {values['perf/step_s']:.0f} s.")
        self._loss = 0.0

    def _collect_from_ranks(self) -> None:
        """Bring the loss metrics of all ranks into rank 0's report."""
        rows = self._row_metrics
        if self.args.world_size > 1:
            rows = gather_object(rows)
            self._loss = sum(gather_object([self._loss]))
        for name, value in rows:
            self.report.add(name, value)
        self._row_metrics = []

    def _print_completions(self, step: int) -> None:
        for sample in self._pending[: self.args.num_completions_to_print]:
            text = self.processing_class.decode(sample.input_ids[sample.completion_mask.astype(bool)])
            print(f"step {step} reward {sample.reward:.3f} advantage {sample.advantage:+.3f}: {text!r}", flush=True)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's own log line, with every metric since the last one."""
        if "loss" in logs:  # not the summary at the end
            logs = {**logs, **self.report.log.flush()}
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        row: PackedRow = inputs["row"]
        return int(self.flops.total(row.tokens, row.pairs, len(np.unique(row.token_index))))

    # ---- weights to the servers -------------------------------------------------------------------------------------

    def _push(self) -> None:
        """Give the servers the current weights. A server that died is waited for."""
        try:
            report = self.sync.push(self.model, self.rollout_state.weight_version)
        except ServerUnreachable as error:
            self._event("warning", "server_lost", f"{str(error)[:1].upper()}{str(error)[1:]}.", url=error.url)
            self._await_server(error.url)
            return
        self.report.add("perf/weight_sync_pause_s", report.pause_s)
        self.report.add("perf/weight_sync_barrier_s", report.barrier_s)
        self.report.add("perf/weight_sync_transfer_s", report.transfer_s)
        self._announce_weights()

    def _announce_weights(self) -> None:
        version = self.rollout_state.weight_version
        self.worker.send(WeightsPushed(version, self.sync.model_name(version)))

    def _await_server(self, url: str) -> None:
        """Wait until a lost server answers again, then bring it up to date. Gives up when an order to stop arrives.

        Raises ServerUnreachable after vllm_server_timeout.
        """
        server = ServerApi(url, self.args.request_timeout)
        started = reported = time.monotonic()
        version_known = self._servers_restored
        while self.intake.order is None and self._servers_restored == version_known:
            if server.is_healthy():
                self._server_back(url)
                return
            now = time.monotonic()
            if now - started > self.args.vllm_server_timeout:
                raise ServerUnreachable(url, f"the server at {url} did not come back within {now - started:.0f} s")
            if now - reported >= 30:
                reported = now
                print(f"waiting for the server at {url}, {now - started:.0f} s", flush=True)
            time.sleep(1)
            self.intake.poll()

    def _server_back(self, url: str) -> None:
        """A server was restarted with the base weights: connect again, push the current ones, let generation go on."""
        self.sync.reopen()
        self.sync.push(self.model, self.rollout_state.weight_version)
        self._servers_restored += 1
        self._announce_weights()
        self.worker.send(ServersReady())
        self._event("info", "server_back", f"The server at {url} is back and has the current weights.", url=url)

    def _look_at_server(self) -> None:
        """Take the row budget from the server if none is set; warn about what makes the ratio to the sampler biased."""
        server = ServerApi(self.args.server_urls[0], self.args.request_timeout)
        server.wait_until_healthy(self.args.vllm_server_timeout)
        info = server.info()
        server.close()
        if self.args.token_budget is None:
            self.args.token_budget = info.max_model_len
        computed = "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else self.args.dtype
        if info.dtype != computed:
            text = f"The server generates in {info.dtype} and the trainer computes in {computed}; their probabilities differ."
            self._event("warning", "dtype_differs", text)
        if self.args.top_k or self.args.top_p < 1 or self.args.min_p or self.args.repetition_penalty != 1:
            text = (
                "top_k, top_p, min_p and repetition_penalty change the sampler's distribution, and the trainer normalises "
                "over the whole vocabulary: the ratio to the sampler is biased."
            )
            self._event("warning", "biased_ratio", text)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write Trainer's checkpoint, the adapter's card and the training position; whole or not at all."""
        step = self.state.global_step
        output = Path(str(self.args.output_dir))
        with self.report.timed("perf/checkpoint_s"):
            self._staging = checkpoint.staging_folder(output, step)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                staged, self._staging = self._staging / f"checkpoint-{step}", None
            self.accelerator.wait_for_everyone()
            self._last_saved = step
            if not self.is_world_process_zero():
                return
            checkpoint.save_rollout_state(staged, self.rollout_state)
            kind = "adapter" if isinstance(self.model, PeftModel) else "full"
            if kind == "adapter":
                names = [_name(function) for function in self.reward_funcs]
                card = {"base_model": self.model_path, "step": step, "rewards": names, "loss_type": self.args.loss_type}
                checkpoint.write_adapter_card(staged, **card)
            final = output / staged.name
            checkpoint.publish(staged, final)
        size = checkpoint.size_bytes(final)
        text = f"Checkpoint of step {step} written."
        self._event("info", "checkpoint", text, step=step, path=str(final), size_bytes=size, kind=kind)
        rotate_checkpoints(output_dir=str(output), save_total_limit=self.args.save_total_limit, use_mtime=True)

    def _event(self, level: Any, name: str, text: str, **data: Any) -> None:
        if self.spool is not None:
            self.spool.event(self.state.global_step, level, name, text, **data)


class _StepClock(TrainerCallback):
    """What the trainer does at moments that only callbacks see."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self._trainer = trainer
        self._started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.start_generation()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._started = self._trainer.report.now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.report.seconds["perf/optimizer_s"] += self._trainer.report.now() - self._started


def _as_list(functions: RewardFunc | Sequence[RewardFunc] | None) -> list[RewardFunc]:
    if functions is None:
        return []
    return [functions] if callable(functions) else list(functions)


def _name(function: RewardFunc) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_rewards(functions: list[RewardFunc], args: AsyncGRPOConfig, environment_factory: Any) -> None:
    for function in functions:
        if not callable(function):
            raise TypeError(f"reward_funcs holds a {type(function).__name__}; only callables are allowed")
    if args.reward_weights is not None and len(args.reward_weights) != len(functions):
        raise ValueError(f"reward_weights has {len(args.reward_weights)} values for {len(functions)} reward functions")


def _check_dataset(dataset: Any) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(f"train_dataset is a {type(dataset).__name__}; a datasets.Dataset (not a stream) is needed")
    if "prompt" not in dataset.column_names:
        raise ValueError(f"train_dataset has no 'prompt' column; found {', '.join(dataset.column_names) or 'no columns'}")
    if not len(dataset):
        raise ValueError("train_dataset has no rows")


def _check_adapter(config: PeftConfig) -> PeftConfig:
    if not isinstance(config, LoraConfig):
        raise NotImplementedError(f"peft_config is a {type(config).__name__}; only LoraConfig is supported")
    return config


def _check_router(model: Any, args: AsyncGRPOConfig) -> None:
    experts = getattr(model.config, "num_experts", None) or getattr(model.config, "num_local_experts", None)
    if args.router_aux_loss_coef is not None and not experts:
        raise ValueError(
            f"router_aux_loss_coef is {args.router_aux_loss_coef}, but model type {model.config.model_type!r} has no experts; "
            "leave it None"
        )
