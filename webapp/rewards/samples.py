"""What a reward function is tried on: an example somebody pasted, or rollouts that a run stored."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from trainer_core.spec import DataSpec
from webapp.rollouts.models import StoredRollout
from webapp.runs.models import Run

GROUPS = 4
"""Stored groups that one test scores."""
SEPARATOR = re.compile(r"^\s*-{3,}\s*$", re.MULTILINE)


class NoSample(ValueError):
    """There is nothing to try the function on; the text is a sentence."""


@dataclass(frozen=True)
class Sample:
    """One call: keyword arguments of the function, and what a person sees of each completion."""

    title: str
    arguments: dict[str, Any]
    texts: list[str]
    stored_rewards: list[float | None]


def pasted(prompt: str, completions: str, columns: str) -> list[Sample]:
    """One group from the form: completions are separated by lines of three dashes, columns are a YAML mapping."""
    texts = [text.strip("\n") for text in SEPARATOR.split(completions.replace("\r\n", "\n"))]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise NoSample("There is no completion to score; paste at least one.")
    try:
        extra = yaml.safe_load(columns)
    except yaml.YAMLError as error:
        raise NoSample(f"The columns are not valid YAML: {' '.join(str(error).split())}.") from error
    if extra is None:
        extra = {}
    if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
        raise NoSample("The columns must be a mapping of names to values, such as answer: 12.")
    messages = [{"role": "user", "content": prompt}]
    arguments = _arguments(messages, [[{"role": "assistant", "content": text}] for text in texts], extra)
    return [Sample("Pasted example", arguments, texts, [None] * len(texts))]


def stored(run: Run, step: int | None) -> list[Sample]:
    """Some groups that a run stored, of one step or of its newest. Columns come from the run's dataset."""
    rollouts = run.rollouts.all()
    if step is None:
        step = rollouts.order_by("-step").values_list("step", flat=True).first()
    if step is None:
        raise NoSample(f"{run.name} has stored no rollouts yet.")
    ids = list(dict.fromkeys(rollouts.filter(step=step).order_by("id").values_list("group_id", flat=True)))[:GROUPS]
    if not ids:
        raise NoSample(f"{run.name} has stored no rollouts of step {step}.")
    data = run.run_spec().data
    samples = []
    for group_id in ids:
        members = list(rollouts.filter(group_id=group_id, step=step).order_by("id"))
        samples.append(_from_group(members, columns_of(data, members[0].row_index)))
    return samples


def _from_group(members: list[StoredRollout], columns: dict[str, Any]) -> Sample:
    completions = [member.data.get("completion") or [] for member in members]
    return Sample(
        f"Step {members[0].step}, row {members[0].row_index}",
        _arguments(members[0].data.get("prompt"), completions, columns),
        [_text(completion) for completion in completions],
        [member.reward for member in members],
    )


def _arguments(prompt: Any, completions: list[Any], columns: dict[str, Any]) -> dict[str, Any]:
    size = len(completions)
    repeated = {name: [value] * size for name, value in columns.items()}
    return {**repeated, "prompts": [prompt] * size, "completions": completions, "completion_ids": [[]] * size}


def _text(completion: Any) -> str:
    if isinstance(completion, list):
        return "\n".join(str(message.get("content") or "") for message in completion if isinstance(message, dict))
    return str(completion)


def columns_of(data: DataSpec, row_index: int) -> dict[str, Any]:
    """The columns of a dataset row beside its prompt, as the trainer gives them to reward functions.

    Generators are made again from their seed, local files are read; a hub dataset is only on the training host, so its
    columns can't be had here.
    """
    if data.source.startswith("reasoning_gym:"):
        return _generated_row(data.model_dump_json(), row_index)
    path = Path(data.source).expanduser()
    if path.suffix not in (".jsonl", ".csv", ".parquet") or not path.is_file():
        return {}
    return {name: value for name, value in _file_row(path, row_index).items() if name != "prompt"}


@lru_cache(maxsize=256)
def _generated_row(data_json: str, row_index: int) -> dict[str, Any]:
    import reasoning_gym

    data = DataSpec.model_validate_json(data_json)
    task = data.source.partition(":")[2]
    entry = reasoning_gym.create_dataset(task, size=data.size, seed=data.seed, **data.options)[row_index]
    return {
        "answer": str(entry["answer"]),
        "reasoning_gym_task": task,
        "reasoning_gym_entry": json.dumps(entry, default=str),
    }


def _file_row(path: Path, row_index: int) -> dict[str, Any]:
    if path.suffix == ".parquet":
        import pyarrow.dataset

        dataset = pyarrow.dataset.dataset(path)
        return dataset.take([row_index]).to_pylist()[0] if row_index < dataset.count_rows() else {}
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return next(islice(csv.DictReader(file), row_index, None), {})
        line = next(islice((line for line in file if line.strip()), row_index, None), "{}")
    return json.loads(line)
