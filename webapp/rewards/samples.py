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
from django.db.models import Max

from trainer_core.spec import DataSpec
from webapp.rollouts.models import StoredRollout
from webapp.runs.models import Run

GROUPS = 8
"""Stored groups that one test scores when nothing else is asked for."""
SEPARATOR = re.compile(r"^\s*-{3,}\s*$", re.MULTILINE)


class NoSample(ValueError):
    """There is nothing to try the function on; the text is a sentence."""


@dataclass(frozen=True)
class Sample:
    """One call: keyword arguments of the function, and what a person sees of each completion.

    `stored_rewards` are what the run gave the completions: by the function called `compared`, or in all where that is empty.
    """

    title: str
    arguments: dict[str, Any]
    texts: list[str]
    stored_rewards: list[float | None]
    compared: str = ""


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


def stored(run: Run, step: int | None, count: int = GROUPS, name: str = "") -> list[Sample]:
    """`count` groups that a run stored: of one step, or its newest. Columns come from the run's dataset.

    Where the run used a reward function called `name`, its own values are what the new ones are compared with.
    """
    rollouts = run.rollouts.filter(row_index__gte=0)  # below are rows of the evaluation dataset
    if not rollouts.exists():
        raise NoSample(f"{run.name} has stored no rollouts yet.")
    of_step = rollouts if step is None else rollouts.filter(step=step)
    groups = of_step.order_by().values_list("group_id").annotate(last=Max("id")).order_by("-last")
    ids = [group_id for group_id, _ in groups[:count]][::-1]
    if not ids:
        raise NoSample(f"{run.name} has stored no rollouts of step {step}.")
    members: dict[str, list[StoredRollout]] = {group_id: [] for group_id in ids}
    for rollout in of_step.filter(group_id__in=ids).defer("text").order_by("id"):
        members[rollout.group_id].append(rollout)
    data = run.run_spec().data
    return [_from_group(group, columns_of(data, group[0].row_index), name) for group in members.values()]


def _from_group(members: list[StoredRollout], columns: dict[str, Any], name: str) -> Sample:
    completions = [member.data.get("completion") or [] for member in members]
    scored = [member.data.get("rewards") for member in members]
    known = bool(name) and all(isinstance(rewards, dict) and name in rewards for rewards in scored)
    return Sample(
        f"Step {members[0].step}, row {members[0].row_index}",
        _arguments(members[0].data.get("prompt"), completions, columns),
        [_text(completion) for completion in completions],
        [rewards[name] for rewards in scored] if known else [member.reward for member in members],
        name if known else "",
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
    if data.is_generated:
        row = _generated_row(data.model_dump_json(), row_index)
        return {data.rename_columns.get(name, name): value for name, value in row.items()}
    path = Path(data.source).expanduser()
    if path.suffix not in (".jsonl", ".csv", ".parquet") or not path.is_file():
        return {}
    row = {data.rename_columns.get(name, name): value for name, value in _file_row(path, row_index).items()}
    return {name: value for name, value in row.items() if name != "prompt"}


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
