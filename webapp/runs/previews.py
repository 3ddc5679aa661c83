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


def prompts(spec: RunSpec) -> list[dict[str, Any]]:
    """The first prompts as the model will read them: `text` and `tokens`, or as messages with `tokens` None and a `note` why.

    Empty for a hub dataset, which is only read where the run runs. Raises ValueError naming the line when a file breaks after
    its first row.
    """
    conversations = [_messages(prompt, spec.data.prompt_suffix) for prompt in _first(spec)]
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


def _first(spec: RunSpec) -> list[Any]:
    source = spec.data.source
    if source.startswith("reasoning_gym:"):
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(
            source.partition(":")[2], size=min(spec.data.size, SHOWN), seed=spec.data.seed, **spec.data.options
        )
        return [dataset[index]["question"] for index in range(len(dataset))]
    if Path(source).suffix in (".jsonl", ".csv", ".parquet"):
        return _from_file(Path(source).expanduser())
    return []


def _from_file(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        batch = next(pyarrow.parquet.ParquetFile(path).iter_batches(SHOWN, columns=["prompt"]), None)
        return batch.column("prompt").to_pylist() if batch is not None else []
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            import csv

            return [row["prompt"] for row in islice(csv.DictReader(file), SHOWN)]
        return [_prompt_of(number, line) for number, line in enumerate(islice(file, SHOWN), 1) if line.strip()]


def _prompt_of(number: int, line: str) -> Any:
    try:
        return json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"line {number} is not a JSON object with a prompt") from error


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
