"""From the sample queue to the rows of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer_core import token_log
from trainer_core.config import AsyncGRPOConfig
from trainer_core.intake import SampleIntake
from trainer_core.loss import StepTotals
from trainer_core.packing.collator import PackedRow, collate
from trainer_core.packing.planner import BudgetPlanner, PackItem, RowPlan, plan_fixed
from trainer_core.report import StepReport
from trainer_core.rollout.types import RolloutSample


@dataclass
class StepPlan:
    """One optimizer step: `micro_batches[i][rank]` is a row. Empty when training ends; `save` then asks for a checkpoint.

    The step's samples count through its rows in order; `logged` are those whose tokens the rollout viewer gets.
    """

    micro_batches: list[list[PackedRow]]
    totals: StepTotals
    save: bool = False
    logged: frozenset[int] = frozenset()

    @property
    def rows(self) -> list[PackedRow]:
        return [row for micro_batch in self.micro_batches for row in micro_batch]

    def of_rank(self, rank: int) -> RankPlan:
        rows = [micro_batch[rank] for micro_batch in self.micro_batches]
        return RankPlan(rows, self.first_samples(rank), self.totals, self.save, self.logged)

    def first_samples(self, rank: int) -> list[int]:
        """For each micro-batch the number of the first sample of this rank's row."""
        counts = [row.samples for row in self.rows]
        ranks = len(self.micro_batches[0]) if self.micro_batches else 1
        return [sum(counts[: index * ranks + rank]) for index in range(len(self.micro_batches))]


@dataclass
class RankPlan:
    """One rank's part of a StepPlan: its row of each micro-batch, and what concerns all ranks."""

    rows: list[PackedRow]
    first_samples: list[int]
    totals: StepTotals
    save: bool
    logged: frozenset[int]


class StepPlanner:
    """Makes the plans; lives on rank 0. `samples` are those of the plan last made."""

    def __init__(
        self,
        *,
        config: AsyncGRPOConfig,
        intake: SampleIntake,
        report: StepReport,
        pair_cost: float,
        event: Callable[..., None],
    ) -> None:
        self.samples: list[RolloutSample] = []
        self._config = config
        self._intake = intake
        self._report = report
        self._pair_cost = pair_cost
        self._event = event
        self._num_top = config.num_sampler_logprobs if config.score_centering else 0
        self._carried: PackItem | None = None

    def next(self) -> StepPlan:
        """Pull the samples of a step and lay them out as rows."""
        wanted, ranks = self._config.gradient_accumulation_steps, self._config.world_size
        plans: list[list[RowPlan]] = []
        while len(plans) < wanted and (micro_batch := self._fill_micro_batch()):
            plans.append(micro_batch)
        order = self._intake.order
        if order is not None or not plans:
            save = order == "stop_and_save" or (order is None and self._config.save_strategy != "no")
            return StepPlan([], StepTotals(0, 0), save)
        with self._report.timed("perf/planner_s"):
            # A last step may be short; ranks still take part in every micro-batch, with rows of nothing.
            plans += [plan_fixed([], ranks, self._pair_cost) for _ in range(wanted - len(plans))]
            micro_batches = [[collate(row, self._num_top) for row in micro_batch] for micro_batch in plans]
        items = [item for micro_batch in plans for row in micro_batch for item in row.items]
        self.samples = [item.sample for item in items]
        self._report.add_samples(self.samples)
        self._report.add_rows(micro_batches, None if self._config.fixed_batch else self._config.token_budget)
        totals = StepTotals(sum(item.terms for item in items), len(items), sum(item.nodes for item in items))
        return StepPlan(micro_batches, totals, logged=token_log.choose(self.samples))

    def _fill_micro_batch(self) -> list[RowPlan]:
        """One row for each rank; empty when there are no more samples."""
        ranks = self._config.world_size
        if self._config.fixed_batch:
            items: list[PackItem] = []
            size = self._config.per_device_train_batch_size * ranks
            while len(items) < size and (item := self._next_item()) is not None:
                items.append(item)
            with self._report.timed("perf/planner_s"):
                return plan_fixed(items, ranks, self._pair_cost) if items else []
        budget: Any = self._config.token_budget
        planner = BudgetPlanner(ranks, budget, self._pair_cost)
        while (item := self._carried or self._next_item()) is not None:
            self._carried = None
            with self._report.timed("perf/planner_s"):
                if planner.oversize(item):
                    self._drop_oversize(item)
                elif not planner.add(item):
                    self._carried = item
                    break
        return planner.rows if any(row.items for row in planner.rows) else []

    def _next_item(self) -> PackItem | None:
        """The next sample with something to train; None when training ends."""
        while (sample := self._intake.next()) is not None:
            masked = self._config.mask_truncated_completions and sample.truncated
            item = None if masked else PackItem.of(sample)
            if item is not None:
                return item
            self._intake.finish(sample)
        return None

    def _drop_oversize(self, item: PackItem) -> None:
        self._report.add("batch/dropped_oversize_total", 1.0)
        self._intake.finish(item.sample)
        self._event(
            "warning",
            "sample_dropped",
            f"A sample of {item.nodes} tokens was dropped: token_budget is {self._config.token_budget}. "
            "Raise token_budget, or lower max_completion_length.",
        )
