"""Metrics of an optimizer step: collected while it runs, written once when it ends."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from trainer_core.flops import FlopCounter
from trainer_core.loss import MetricValue
from trainer_core.metrics import MetricBuffer
from trainer_core.packing.collator import PackedRow
from trainer_core.rollout.types import RolloutSample
from trainer_core.system import SystemMonitor

MicroBatchRows = Sequence[PackedRow]
Value = float | tuple[float, float]
Moment = float | torch.cuda.Event


def scored_positions(row: PackedRow) -> int:
    """Positions of a row that reach the output layer: trained tokens, shared ones once."""
    return len(np.unique(row.token_index))


class StepReport:
    """Values of the running step. `step` is flushed into one spool line; `log` lives until the next Trainer.log."""

    def __init__(self, device: torch.device) -> None:
        self.step = MetricBuffer()
        self.log = MetricBuffer()
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._system = SystemMonitor()
        self._started = time.perf_counter()
        self._rows: list[tuple[list[tuple[str, int]], torch.Tensor]] = []
        self._spans: list[tuple[str, Moment, Moment]] = []

    def restart(self) -> None:
        """The step's clock starts now."""
        self._started = self.now()

    @property
    def buffers(self) -> tuple[MetricBuffer, MetricBuffer]:
        return self.step, self.log

    def add(self, name: str, value: Value) -> None:
        for buffer in self.buffers:
            buffer.add(name, value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`; waits for the GPU, whose work is queued."""
        started = self.now()
        yield
        self.seconds[name] += self.now() - started

    @contextmanager
    def timed_on_device(self, name: str) -> Iterator[None]:
        """Add the seconds that the device took for the block to `name`; does not wait, `take_rows` adds them up."""
        started = self.moment()
        yield
        self.add_span(name, started)

    def add_span(self, name: str, started: Moment) -> None:
        """The device's seconds from a moment to now, for `name`."""
        self._spans.append((name, started, self.moment()))

    def moment(self) -> Moment:
        """A moment of the device's own work. Where that is queued, this waits for nothing."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_row(self, loss: torch.Tensor, metrics: Mapping[str, MetricValue]) -> None:
        """Keep a row's share of the loss and its metric values, on the device: waiting for them would stop its work."""
        parts = {name: value if isinstance(value, tuple) else (value,) for name, value in metrics.items()}
        flat = [loss, *(part for pair in parts.values() for part in pair)]
        names = [(name, len(pair)) for name, pair in parts.items()]
        self._rows.append((names, torch.stack([part.float() for part in flat])))

    def take_rows(self) -> tuple[float, list[tuple[str, Value]]]:
        """This rank's loss and values of its rows since the last call. Waits for the device, and adds up its times."""
        rows, self._rows = self._rows, []
        total, values = 0.0, list[tuple[str, Value]]()
        for names, table in rows:
            loss, *rest = table.tolist()
            total += loss
            numbers = iter(rest)
            for name, length in names:
                value, *count = [next(numbers) for _ in range(length)]
                if count != [0.0]:
                    values.append((name, (value, count[0]) if count else value))
        self.now()
        spans, self._spans = self._spans, []
        for name, start, end in spans:
            self.seconds[name] += _seconds(start, end)
        return total, values

    def add_ranks(self, taken: Sequence[tuple[float, list[tuple[str, Value]]]]) -> None:
        """Take up what `take_rows` gave on all ranks."""
        self.add("loss", sum(loss for loss, _ in taken))
        for _, values in taken:
            for name, value in values:
                self.add(name, value)

    def add_samples(self, samples: Sequence[RolloutSample]) -> None:
        """Metrics of the samples that a step trains on."""
        for sample in samples:
            self.add("rewards/trained_mean", sample.reward)
            self.add("sample/forwarded_tokens_mean", len(sample.input_ids))
            self.add("sample/forwarded_tokens_max", len(sample.input_ids))
            self.add("sample/trained_tokens_mean", float(np.sum(sample.completion_mask)))
            for name, value in sample.metrics.items():
                self.add(name, value)

    def add_rows(self, micro_batches: Sequence[MicroBatchRows], token_budget: int | None) -> None:
        """Metrics of the step's packing. Rows without samples are filler and count only as imbalance."""
        rows = [row for micro_batch in micro_batches for row in micro_batch if row.samples]
        for row in rows:
            self.add("batch/samples_per_row", row.samples)
            self.add("batch/row_tokens_mean", row.tokens)
            self.add("batch/row_tokens_max", row.tokens)
            if token_budget is not None:
                self.add("batch/row_fill_frac", row.tokens / token_budget)
            self.add("batch/packing_ratio", (float(row.raw_tokens), float(row.tokens)))
            self.add("batch/masked_token_frac", (float(row.tokens - scored_positions(row)), float(row.tokens)))
        used = [micro_batch for micro_batch in micro_batches if any(row.samples for row in micro_batch)]
        for micro_batch in used:
            costs = [row.cost for row in micro_batch]
            lengths = [row.tokens for row in micro_batch]
            self.add("batch/row_imbalance", max(costs) / (sum(costs) / len(costs)))
            self.add("batch/pad_frac", 1 - sum(lengths) / (len(lengths) * max(lengths)))
        self.add("batch/groups_per_step", len({group for row in rows for group in row.groups}))
        self.add("batch/samples_per_step", sum(row.samples for row in rows))
        self.add("batch/microbatches_per_step", len(used))
        self.add("batch/forwarded_tokens_per_step", self.tokens(rows))
        self.add("batch/trained_tokens_per_step", sum(row.terms for row in rows))

    @staticmethod
    def tokens(rows: MicroBatchRows) -> int:
        return sum(row.tokens for row in rows)

    def finish(self, rows: MicroBatchRows, flops: FlopCounter, peak: float | None, devices: int) -> dict[str, float]:
        """Close the step: times, throughput, memory. Returns the reduced values and starts the next step.

        `rows` are those of all ranks; `peak` is one device's FLOP/s, None where unknown.
        """
        now = time.perf_counter()
        wall = now - self._started
        self._started = now
        work = sum(flops.total(row.tokens, flops.pairs(row.layout.position_ids), scored_positions(row)) for row in rows)
        tokens, terms = self.tokens(rows), sum(row.terms for row in rows)
        compute = self.seconds["perf/fwd_bwd_s"]
        self.add("perf/step_s", wall)
        for name, seconds in self.seconds.items():
            self.add(name, seconds)
        self.add("perf/forwarded_tok_s_fwd_bwd", tokens / compute)
        self.add("perf/forwarded_tok_s_wall_clock", tokens / wall)
        self.add("perf/trained_tok_s_wall_clock", terms / wall)
        self.add("perf/model_tflops_s", work / compute / 1e12)
        if peak is not None:
            self.add("perf/mfu_fwd_bwd", 100 * work / compute / (peak * devices))
            self.add("perf/mfu_wall_clock", 100 * work / wall / (peak * devices))
        if self._device.type == "cuda":
            self.add("perf/gpu_mem_peak_gib", torch.cuda.max_memory_allocated(self._device) / 2**30)
            torch.cuda.reset_peak_memory_stats(self._device)
        self.add("perf/cpu_mem_peak_gib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        for name, value in self._system.sample().items():
            self.add(name, value)
        self.seconds.clear()
        return self.step.flush()

    def late_totals(self) -> dict[str, float]:
        """Totals counted since the last step ended, which no step will report any more. Means without a step are left out."""
        return {name: value for name, value in self.step.flush().items() if name.endswith("_total")}

    def now(self) -> float:
        """Seconds of a steady clock, once all work of the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _seconds(start: Moment, end: Moment) -> float:
    """Between two moments that have passed."""
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    return float(start.elapsed_time(end)) / 1000
