"""What a spec amounts to, shown beside the form: the size of a step, and its first prompts."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from trainer_core.spec import RunSpec
from webapp.hosts.models import Device
from webapp.runs import rendering
from webapp.runs.checks import local_model
from webapp.runs.commands import preview
from webapp.runs.data_checks import datasets_of, is_file
from webapp.runs.peeking import Peeked

SHOWN = 3
MAX_CHARACTERS = 1200
SLOW_LORA = 1e-5
"""A learning rate below this is one for full training."""


def facts(spec: RunSpec) -> list[str]:
    """Sentences about the run that follow from its settings."""
    samples, group = spec.samples_per_step, spec.rollout.num_generations
    budget = spec.training.token_budget
    if budget is not None and budget <= 0:
        step = f"A step trains on {samples} samples: {samples // group} prompts × {group} rollouts."
    else:
        step = f"A step fills {spec.training.gradient_accumulation_steps} packed rows on each trainer device."
    trained = f"LoRA adapter of rank {spec.lora.r}" if spec.lora.enabled else "all weights"
    pushes = spec.training.weight_sync_steps
    when = "after each step" if pushes == 1 else f"every {pushes} steps"
    kept = spec.training.max_steps // spec.checkpoints.save_steps
    kept += 1 if spec.training.max_steps % spec.checkpoints.save_steps else 0
    kept = min(kept, spec.checkpoints.save_total_limit or kept)
    learning = spec.training.learning_rate
    advice = []
    if spec.lora.enabled and learning < SLOW_LORA:
        advice.append(f"A LoRA adapter hardly moves at a learning rate of {learning:g}; about 1e-4 is usual.")
    room = spec.server.max_model_len - spec.rollout.max_completion_length
    return [
        *advice,
        step,
        f"{spec.training.max_steps:,} steps, training {trained}; weights go to the server {when}.",
        f"Prompts may have up to {room:,} tokens; completions up to {spec.rollout.max_completion_length:,}.",
        f"{kept:,} checkpoint{'' if kept == 1 else 's'} will be kept.",
    ]


def commands(spec: RunSpec) -> list[dict[str, str]]:
    """Exactly what the supervisor will start, on the kind of device that the studio's hosts have."""
    gpus = Device.objects.filter(kind=Device.Kind.GPU, present=True).exists()
    return preview(spec, str(local_model(spec.model.path) or spec.model.path), "cuda" if gpus else "cpu")


def datasets() -> list[str]:
    """Datasets to suggest: the generators of reasoning-gym. Importing it takes a second, the first time."""
    from reasoning_gym.factory import DATASETS

    return [f"reasoning_gym:{task}" for task in sorted(DATASETS)]


def data_facts(spec: RunSpec, inside: Peeked) -> list[str]:
    """Columns of the hub datasets, with their names in the run, and what could not be read of them."""
    facts = []
    for section, data in datasets_of(spec).items():
        if found := inside.datasets.get(section):
            after = data.names_after(found.columns)
            columns = [name if name == new else f"{name} (as {new})" for name, new in after.items()]
            facts.append(f"Columns of {data.source}: {', '.join(columns)}.")
    later = "The run's host checks it before it starts the server."
    return [*facts, *(f"Not looked at yet: {text.rstrip('.')}. {later}" for text in inside.unread)]


def prompts(spec: RunSpec, inside: Peeked) -> list[dict[str, Any]]:
    """The first prompts as the model will read them: `text` and `tokens`, or as messages with `tokens` None and a `note` why.

    Those of a hub dataset are what was read of it; empty where nothing was. Raises ValueError naming the line when a file
    breaks after its first row.
    """
    conversations = [_messages(prompt, spec.data.prompt_suffix) for prompt in _first(spec, inside)]
    if not conversations:
        return []
    folder = local_model(spec.model.path) or _cached_model(spec.model.path)
    try:
        if folder is None:
            raise rendering.NotRendered(f"The tokenizer of {spec.model.path} is not on this machine.")
        rendered = rendering.render(folder, conversations)
    except rendering.NotRendered as error:
        rendered = [{"text": _as_text(one), "tokens": None, "note": str(error)} for one in conversations]
    return [{**one, "text": _short(one["text"])} for one in rendered]


def _cached_model(repo: str) -> Path | None:
    """The folder of a hub model whose tokenizer the hub's cache on this machine has."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, "tokenizer_config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _first(spec: RunSpec, inside: Peeked) -> list[Any]:
    data = spec.data
    if data.is_generated:
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(
            data.source.partition(":")[2], size=min(data.size, SHOWN), seed=data.seed, **data.options
        )
        return [dataset[index]["question"] for index in range(len(dataset))]
    if is_file(data):
        return _from_file(Path(data.source).expanduser(), data.stored_name("prompt"))
    found = inside.datasets.get("data")
    return [] if found is None else [row["prompt"] for row in found.rows[:SHOWN]]


def _from_file(path: Path, column: str) -> list[Any]:
    """The first prompts, from the column of this name."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        batch = next(pyarrow.parquet.ParquetFile(path).iter_batches(SHOWN, columns=[column]), None)
        return batch.column(column).to_pylist() if batch is not None else []
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            import csv

            return [row[column] for row in islice(csv.DictReader(file), SHOWN)]
        return [_prompt_of(number, line, column) for number, line in enumerate(islice(file, SHOWN), 1) if line.strip()]


def _prompt_of(number: int, line: str, column: str) -> Any:
    try:
        return json.loads(line)[column]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"line {number} is not a JSON object with a {column}") from error


def _messages(prompt: Any, suffix: str) -> list[dict[str, Any]]:
    """A prompt as a conversation, as trainer_core/rollout/datasets.py makes it: text is one user message with the suffix."""
    if isinstance(prompt, list):
        return [message if isinstance(message, dict) else {"role": "?", "content": str(message)} for message in prompt]
    text = f"{prompt} {suffix}" if suffix and not suffix[0].isspace() else f"{prompt}{suffix}"
    return [{"role": "user", "content": text}]


def _as_text(conversation: list[dict[str, Any]]) -> str:
    return "\n".join(f"[{message.get('role')}] {message.get('content')}" for message in conversation)


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
