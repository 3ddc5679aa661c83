"""Prompts: reasoning-gym generators, local files, hub datasets. Checked before a model is loaded."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import datasets
import httpx

from trainer_core.rollout.streams import column_names, first_row
from trainer_core.spec import DataSpec
from trainer_core.spec.inputs import REASONING_GYM

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
LOADING_ERRORS = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, httpx.HTTPError)
WRONG_NAMES = {
    r"available configs: \[(.*?)\]": "has several configurations: {names}; name one of them (data.config)",
    r"BuilderConfig .* not found\. Available: \[(.*?)\]": "has no configuration {data.config!r}; it has {names}",
    r"Unknown split .* Should be one of \[(.*?)\]": "has no split {data.split!r}; it has {names}",
    r"Bad split: .*Available splits: \[(.*?)\]": "has no split {data.split!r}; it has {names}",
}
"""What the datasets library says about a name that is wrong, with the names there are; and what is said here."""


class NotReached(ValueError):
    """The hub does not answer, so what it holds is not known; the text is one sentence."""


def load_prompts(data: DataSpec) -> datasets.Dataset | datasets.IterableDataset:
    """The rows of a run: a `prompt` column (a list of chat messages), and columns for the reward functions.

    Columns are renamed first. Text prompts become one user message, with the prompt suffix appended. With `streaming` the
    rows are a stream. Raises ValueError with one sentence that says what was found and what is allowed.
    """
    dataset = _open(data)
    if data.rename_columns:
        after = data.names_after(column_names(dataset))
        if changed := {old: new for old, new in after.items() if old != new}:
            dataset = dataset.rename_columns(changed)
    check_prompts(dataset, data.source)
    if data.is_generated:
        return dataset
    if data.streaming:
        return dataset.map(_as_messages, fn_kwargs={"suffix": data.prompt_suffix})
    return dataset.map(_as_messages, fn_kwargs={"suffix": data.prompt_suffix}, desc="prompts")


def first_rows(data: DataSpec, count: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Names of the columns as they are stored, and the first rows with the names of the run, prompts as they are stored.

    Reads no further than that: a generator makes so many rows, files and hub datasets are streamed. Raises ValueError as
    `load_prompts`, and whatever the way to the hub raises.
    """
    generated = data.is_generated
    changes = {"streaming": not generated, "size": min(data.size, count)}
    dataset = _open(data.model_copy(update=changes))
    rows = list(itertools.islice(dataset, count))
    columns = list(dataset.column_names or (rows[0] if rows else []))
    after = data.names_after(columns)
    rows = [{after.get(name, name): value for name, value in row.items()} for row in rows]
    _check_first(data.source, list(after.values()), rows[0] if rows else None)
    return columns, rows


def _open(data: DataSpec) -> Any:
    """The rows as they are stored."""
    if data.is_generated:
        return _reasoning_gym(data)
    if data.options:
        raise ValueError(f"generator options are given, but {data.source!r} is no reasoning_gym:<task>; leave them out")
    if data.streaming:
        return _stream(data)
    return _file(data) if Path(data.source).suffix in FILE_BUILDERS else _hub(data)


def check_prompts(dataset: Any, source: str) -> None:
    """Raise ValueError unless the dataset has rows and a usable `prompt` column; the columns found are named."""
    first = first_row(dataset)
    _check_first(source, list(dataset.column_names or first or []), first)


def _check_first(source: str, columns: list[str], first: dict[str, Any] | None) -> None:
    if "prompt" not in columns:
        found = ", ".join(columns) or "no columns"
        raise ValueError(f"dataset {source} has no 'prompt' column; found {found}; rename one (data.rename_columns)")
    if first is None:
        raise ValueError(f"dataset {source} has no rows")
    problem = prompt_problem(first["prompt"])
    if problem:
        raise ValueError(
            f"the 'prompt' column of {source} holds {problem}; text or a list of chat messages is expected"
        )


def prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "empty text"
    if not isinstance(prompt, list) or not prompt:
        return f"{type(prompt).__name__} {str(prompt)[:60]!r}"
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"an entry without 'role' and 'content': {str(message)[:60]!r}"
        if message["content"] is None and message.get("tool_calls"):
            continue  # an example of a call
        if not isinstance(message["content"], str):
            return (
                f"a message whose content is {type(message['content']).__name__}, not text (images are not supported)"
            )
    return None


def _as_messages(row: dict[str, Any], suffix: str) -> dict[str, Any]:
    if isinstance(row["prompt"], str):
        return {"prompt": [{"role": "user", "content": _with_suffix(row["prompt"], suffix)}]}
    return {}


def _with_suffix(text: str, suffix: str) -> str:
    return f"{text} {suffix}" if suffix and not suffix[0].isspace() else text + suffix


def _reasoning_gym(data: DataSpec) -> datasets.Dataset:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task = data.source.removeprefix(REASONING_GYM)
    if task not in DATASETS:
        near = [name for name in sorted(DATASETS) if task[:4].lower() in name][:8] or sorted(DATASETS)[:8]
        raise ValueError(f"reasoning_gym has no task {task!r} (it has {len(DATASETS)}, such as {', '.join(near)})")
    try:
        entries = reasoning_gym.create_dataset(task, size=data.size, seed=data.seed, **data.options)
        rows = [_entry_row(task, entry, data.prompt_suffix) for entry in entries]
    # whatever a generator's own checks raise (AssertionError, TypeError, ValueError, ...) is about the options given
    except Exception as error:
        raise ValueError(f"reasoning_gym:{task} does not take these options ({data.options}): {error}") from error
    return datasets.Dataset.from_list(rows)


def _entry_row(task: str, entry: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": _with_suffix(entry["question"], suffix)}],
        "answer": str(entry["answer"]),
        "reasoning_gym_task": task,
        # JSON, since metadata differs in shape from row to row
        "reasoning_gym_entry": json.dumps(entry, default=str),
    }


def _existing(data: DataSpec) -> Path:
    path = Path(data.source).expanduser()
    if not path.is_file():
        raise ValueError(f"dataset file {data.source} does not exist on the training host")
    if path.stat().st_size == 0:
        raise ValueError(f"dataset file {data.source} is empty")
    return path


def _stream(data: DataSpec) -> datasets.IterableDataset:
    """Rows as they are read, without a copy on this host's disk."""
    suffix = Path(data.source).suffix
    try:
        if suffix in FILE_BUILDERS:
            files = str(_existing(data))
            return datasets.load_dataset(FILE_BUILDERS[suffix], data_files=files, split="train", streaming=True)
        return datasets.load_dataset(data.source, data.config or None, split=data.split, streaming=True)
    except LOADING_ERRORS as error:
        raise _refusal(data, "streamed", error) from error


def _file(data: DataSpec) -> datasets.Dataset:
    path = _existing(data)
    try:
        return datasets.Dataset.from_dict(
            datasets.load_dataset(FILE_BUILDERS[path.suffix], data_files=str(path), split="train").to_dict()
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"dataset file {data.source} cannot be read as {path.suffix[1:]}: {reason}") from error


def _hub(data: DataSpec) -> datasets.Dataset:
    try:
        return datasets.load_dataset(data.source, data.config or None, split=data.split)
    except LOADING_ERRORS as error:
        raise _refusal(data, "loaded", error) from error


def _refusal(data: DataSpec, verb: str, error: Exception) -> ValueError:
    """Why a dataset cannot be had; where a name in the spec is wrong, with the names there are."""
    text = str(error)
    for pattern, wrong in WRONG_NAMES.items():
        if found := re.search(pattern, text):
            names = ", ".join(re.findall(r"'([^']*)'", found[1])) or "none"
            return ValueError(f"dataset {data.source!r} {wrong.format(data=data, names=names)}")
    reason = text.splitlines()[0] if text else type(error).__name__
    kind = NotReached if isinstance(error, (ConnectionError, TimeoutError, httpx.TransportError)) else ValueError
    return kind(
        f"dataset {data.source!r} (split {data.split!r}) cannot be {verb}: {reason}; allowed are reasoning_gym:<task>, a hub "
        "dataset id, or a .jsonl, .csv or .parquet file"
    )
