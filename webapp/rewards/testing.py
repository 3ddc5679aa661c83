"""Trying a reward function: a sample, the sandbox, and what a person is shown of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_core.rewards.sandbox import Problem, UserError, function_name, score_once
from webapp.rewards import samples
from webapp.rewards.comparison import Comparison
from webapp.rewards.forms import TryForm
from webapp.rewards.services import problems_of

DEADLINE_S = 15.0
"""For all calls of one test together; somebody is waiting for it."""


@dataclass(frozen=True)
class Row:
    """One completion, what the function gave it now, and what the run had stored."""

    text: str
    value: float | None
    stored: float | None


@dataclass(frozen=True)
class Call:
    """One group that was scored, in `seconds`."""

    title: str
    seconds: float
    columns: str
    rows: list[Row]


@dataclass
class Outcome:
    """What a test showed. `refusal` says why nothing was run; `error` what the function did wrong."""

    refusal: str = ""
    problems: list[Problem] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    error: UserError | None = None
    failed_call: str = ""
    error_source: str = ""
    output: str = ""
    level: str = ""

    compared: str = ""
    """Whose rewards the run had stored: a function's by this name; in all where it is empty."""

    @property
    def comparison(self) -> Comparison:
        return Comparison.of([[(row.stored, row.value) for row in call.rows] for call in self.calls])

    @property
    def slowest_s(self) -> float:
        return max((call.seconds for call in self.calls), default=0.0)

    @property
    def mean_s(self) -> float:
        return sum(call.seconds for call in self.calls) / len(self.calls) if self.calls else 0.0

    @property
    def has_stored(self) -> bool:
        return any(row.stored is not None for call in self.calls for row in call.rows)


def run_test(source: str, form: TryForm) -> Outcome:
    """Score a sample with the source, in the sandbox. The form must be valid."""
    if problems := problems_of(source):
        return Outcome(problems=problems)
    try:
        chosen = _chosen(form.cleaned_data, function_name(source))
    except samples.NoSample as error:
        return Outcome(refusal=str(error))
    result = score_once(source, function_name(source), [sample.arguments for sample in chosen], DEADLINE_S)
    outcome = Outcome(error=result.error, output=result.output.strip(), level=result.level, compared=chosen[0].compared)
    for sample, values, seconds in zip(chosen, result.values, result.seconds, strict=False):
        rows = [Row(*row) for row in zip(sample.texts, values, sample.stored_rewards, strict=True)]
        columns = sorted(set(sample.arguments) - {"prompts", "completions", "completion_ids"})
        outcome.calls.append(Call(sample.title, seconds, ", ".join(columns), rows))
    if result.error is not None:
        if len(result.values) < len(chosen) and result.level:
            outcome.failed_call = chosen[len(result.values)].title
        lines = source.splitlines()
        if result.error.line and result.error.line <= len(lines):
            outcome.error_source = lines[result.error.line - 1].strip()
    return outcome


def _chosen(data: dict[str, Any], name: str) -> list[samples.Sample]:
    if data["on"] == "stored":
        if data["run"] is None:
            raise samples.NoSample("Choose a run whose rollouts are to be scored.")
        return samples.stored(data["run"], data["step"], data["groups"] or samples.GROUPS, name)
    return samples.pasted(data["prompt"], data["completions"], data["columns"])
