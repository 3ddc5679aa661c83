"""What can be known to be wrong with the datasets of a spec: those of training and of evaluation, by the same rules."""

from __future__ import annotations

import csv
import json
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from trainer_core.rewards import check_columns
from trainer_core.spec import DataSpec, RunSpec
from webapp.runs import hub
from webapp.runs.problems import Problem

FILE_SUFFIXES = (".jsonl", ".csv", ".parquet")
GENERATED_COLUMNS = ("prompt", "answer", "reasoning_gym_task", "reasoning_gym_entry")
"""Columns of every reasoning-gym task, as trainer_core/rollout/datasets.py makes them."""
Section = Literal["data", "evaluation"]


def datasets_of(spec: RunSpec) -> dict[Section, DataSpec]:
    """The datasets of a spec by the section that names them."""
    found: dict[Section, DataSpec] = {"data": spec.data}
    if (held_out := spec.evaluation_data()) is not None:
        found["evaluation"] = held_out
    return found


def check_data(spec: RunSpec, access: hub.Access) -> list[Problem]:
    """Without reading more than the beginning of a file; of a hub dataset only whether there is one."""
    found: list[Problem] = []
    for section, data in datasets_of(spec).items():
        for problem in _check(spec, section, data, access):
            if problem.message not in [known.message for known in found]:  # evaluation shares settings with training
                found.append(problem)
    return found


def is_file(data: DataSpec) -> bool:
    return data.source.endswith(FILE_SUFFIXES)


def is_on_hub(data: DataSpec) -> bool:
    return not data.is_generated and not is_file(data) and not data.source.startswith(("/", ".", "~"))


def _check(spec: RunSpec, section: Section, data: DataSpec, access: hub.Access) -> list[Problem]:
    if data.is_generated:
        problem = _check_generator(data, section)
        return [problem] if problem else _check_columns(spec, section, data, list(GENERATED_COLUMNS))
    if data.options:
        return [
            Problem("data.options", "Generator options are only for 'reasoning_gym:<task>' datasets; leave them empty.")
        ]
    if is_file(data):
        return _check_file(spec, section, data)
    if not is_on_hub(data):
        found = Path(data.source).suffix or "no ending"
        return [Problem(f"{section}.source", f"A local dataset ends in {', '.join(FILE_SUFFIXES)}; found {found}.")]
    message = hub.problem("dataset", data.source, access)
    return [Problem(f"{section}.source", message)] if message else []


def _check_generator(data: DataSpec, section: Section) -> Problem | None:
    import reasoning_gym  # takes a second; only when a spec is checked
    from reasoning_gym.factory import DATASETS

    task = data.source.partition(":")[2]
    if task not in DATASETS:
        return Problem(f"{section}.source", f"reasoning-gym has no task {task!r}{_nearest(task, list(DATASETS))}.")
    allowed = [name for name in DATASETS[task][1].__dataclass_fields__ if name not in ("seed", "size")]
    if unknown := sorted(set(data.options) - set(allowed)):
        has = ", ".join(allowed) or "none"
        return Problem("data.options", f"{task} has no option {', '.join(unknown)}; it has {has}.")
    try:
        reasoning_gym.create_dataset(task, size=min(data.size, 8), seed=data.seed, **data.options)[0]
    except (AssertionError, TypeError, ValueError, KeyError, IndexError) as error:
        return Problem("data.options", f"{task} does not accept these options: {error or type(error).__name__}.")
    return None


def _nearest(word: str, words: list[str]) -> str:
    near = get_close_matches(word, words, n=3, cutoff=0.5)
    return (
        f"; the closest are {', '.join(near)}"
        if near
        else f"; it has {len(words)} tasks, such as {', '.join(words[1:4])}"
    )


def _check_file(spec: RunSpec, section: Section, data: DataSpec) -> list[Problem]:
    path = Path(data.source).expanduser()
    if not path.is_file():
        return [Problem(f"{section}.source", f"There is no file {path} on this machine.")]
    try:
        columns = file_columns(path)
    except (ValueError, OSError) as error:
        return [Problem(f"{section}.source", f"{path} can't be read: {error}.")]
    return _check_columns(spec, section, data, columns)


def _check_columns(spec: RunSpec, section: Section, data: DataSpec, columns: list[str]) -> list[Problem]:
    """Of columns as they are stored: that they can be renamed as asked, that there is a prompt, and what rewards need."""
    try:
        after = list(data.names_after(columns).values())
    except ValueError as error:
        return [Problem(f"{section}.rename_columns", f"{str(error)[:1].upper()}{str(error)[1:]}.")]
    if "prompt" not in after:
        found = ", ".join(columns) or "none"
        text = f"{Path(data.source).name} has no 'prompt' column; its columns are: {found}. Rename one of them."
        return [Problem(f"{section}.source", text)]
    try:
        check_columns(spec.builtin_rewards, after)
    except ValueError as error:
        where = "rewards" if section == "data" else "evaluation.source"
        return [Problem(where, f"{'The' if section == 'data' else 'In evaluation the'} {error}.")]
    return []


def file_columns(path: Path) -> list[str]:
    """Column names of a .jsonl, .csv or .parquet file, from its beginning. Raises ValueError or OSError."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return list(pyarrow.parquet.read_schema(path).names)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"not a Parquet file ({str(error).splitlines()[0].rstrip('.')})") from error
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return next(csv.reader(file), [])
        line = next((line for line in file if line.strip()), "")
    if not line:
        raise ValueError("it is empty")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"its first line is not JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise ValueError(f"its first line is a JSON {type(row).__name__}; an object with a 'prompt' key is needed")
    return list(row)
