"""The model card of a checkpoint: what it is, how it came about, how to load it. Goes with every download for use."""

from __future__ import annotations

import re
from typing import Any

import yaml
from pydantic import ValidationError

from trainer_core.spec import RunSpec
from webapp.checkpoints.curve import svg
from webapp.checkpoints.models import Checkpoint
from webapp.metrics.reading import parts, traces
from webapp.rewards.models import RewardVersion

CURVE_FILE, SPEC_FILE = "reward_curve.svg", "run.yaml"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CURVE_ROWS = 400


def card_files(checkpoint: Checkpoint, *, merged: bool = False) -> dict[str, str]:
    """Files by name: README.md, the reward curve, the run's settings, and the source of each reward written here.

    `merged`: for the adapter's base model with the adapter merged into it.
    """
    run = checkpoint.run
    curve = traces(parts(run), ["reward"], rows=CURVE_ROWS)["reward"]
    steps, means = [], []
    if curve and curve[0].attempt is None:
        steps, means = curve[0].rows["step"].tolist(), curve[0].rows["mean"].tolist()
    files = {CURVE_FILE: svg(steps, means, checkpoint.step)}
    try:
        spec = run.run_spec()
    except ValidationError:
        # A run from elsewhere, or from before a setting changed: its files are to be had all the same.
        return {"README.md": _readme(checkpoint, None, merged, {}), **files}
    versions = {
        reward.name: RewardVersion.objects.filter(function__name=reward.name, number=reward.version).first()
        for reward in spec.rewards if reward.version is not None
    }  # fmt: skip
    known = {name: version for name, version in versions.items() if version is not None}
    files[SPEC_FILE] = spec.to_yaml()
    files |= {f"rewards/{name}-v{version.number}.py": version.source for name, version in known.items()}
    return {"README.md": _readme(checkpoint, spec, merged, known), **files}


def _readme(checkpoint: Checkpoint, spec: RunSpec | None, merged: bool, versions: dict[str, RewardVersion]) -> str:
    adapter = checkpoint.kind == Checkpoint.Kind.ADAPTER and not merged
    base = spec.model.path if spec else "unknown"
    header: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning", *(["lora"] if checkpoint.kind == Checkpoint.Kind.ADAPTER else [])],
    }  # fmt: skip
    if HUB_ID.fullmatch(base):
        header["base_model"] = base
    if spec and HUB_ID.fullmatch(spec.data.source):
        header["datasets"] = [spec.data.source]
    what = "LoRA adapter" if adapter else "Model with its LoRA adapter merged" if merged else "Model"
    lines = [
        "---", yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip(), "---", "",
        f"# {_plain(checkpoint.run.name)}, step {checkpoint.step}", "",
        f"{what}, trained with asynchronous GRPO in Offbeat.", "", f"![Mean reward by step]({CURVE_FILE})", "",
        "| | |", "|---|---|", f"| Base model | {_code(base)} |",
    ]  # fmt: skip
    if spec:
        lines += _facts(spec)
    reward = "not known" if checkpoint.reward is None else f"{checkpoint.reward:.4g}"
    lines += [
        f"| Mean reward at step {checkpoint.step} | {reward} |", *_evaluation(checkpoint),
        f"| Written | {checkpoint.created_at:%Y-%m-%d %H:%M} UTC, attempt {checkpoint.attempt.number} |",
        f"| Run | `{checkpoint.run_id}` |", "",
    ]  # fmt: skip
    if spec:
        lines += _rewards(spec, versions)
    lines += ["## How to load it", "", "```python", *_loading(adapter, base, checkpoint.step), "```", ""]
    if spec:
        lines += [f"All settings are in [{SPEC_FILE}]({SPEC_FILE}); `offbeat launch {SPEC_FILE}` trains it again.", ""]
    return "\n".join(lines)


def _evaluation(checkpoint: Checkpoint) -> list[str]:
    """What was measured on prompts that the run is not trained on, if anything was."""
    if not checkpoint.measured:
        return []
    found = ", ".join(f"{name} {value:.4g}" for name, value in checkpoint.measured)
    best = "; the best of the run so far" if checkpoint.best else ""
    return [f"| Evaluation at step {checkpoint.step} | {found}{best} |"]


def _facts(spec: RunSpec) -> list[str]:
    training, rollout = spec.training, spec.rollout
    data = f"{_code(spec.data.source)}, split {_code(spec.data.split)}"
    if spec.data.is_generated:
        data = f"{_code(spec.data.source)}, {spec.data.size} rows, seed {spec.data.seed}"
    method = f"LoRA, rank {spec.lora.r}, alpha {spec.lora.alpha}" if spec.lora.enabled else "all weights"
    return [
        f"| Dataset | {data} |",
        f"| Trained | {method}; {training.loss_type} loss, learning rate {training.learning_rate:g}, seed {training.seed} |",
        f"| Rollouts | {rollout.num_generations} for each prompt, at most {rollout.max_completion_length} tokens, temperature "
        f"{rollout.temperature:g}, staleness at most {rollout.max_staleness} |",
    ]  # fmt: skip


def _rewards(spec: RunSpec, versions: dict[str, RewardVersion]) -> list[str]:
    lines = ["## Rewards", "", "| function | version | weight | SHA-256 of its source |", "|---|---|---|---|"]
    for reward in spec.rewards:
        version = versions.get(reward.name)
        name = _code(reward.name)
        if version is not None:
            name = f"[{name}](rewards/{reward.name}-v{version.number}.py)"
        number = "built in" if reward.version is None else str(reward.version)
        digest = f"`{version.sha256}`" if version else ""
        lines.append(f"| {name} | {number} | {reward.weight:g} | {digest} |")
    return [*lines, ""]


def _loading(adapter: bool, base: str, step: int) -> list[str]:
    folder = f"path/to/step-{step}"
    if not adapter:
        return [
            "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            f'model = AutoModelForCausalLM.from_pretrained("{folder}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
        ]  # fmt: skip
    return [
        "from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f"base = AutoModelForCausalLM.from_pretrained({base!r})", f'model = PeftModel.from_pretrained(base, "{folder}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")',
    ]  # fmt: skip


def _code(text: str) -> str:
    """As code in a table's cell, whatever it holds."""
    return f"`{text.replace('`', '').replace('|', '/').replace(chr(10), ' ')}`"


def _plain(text: str) -> str:
    """Text that Markdown takes for nothing else."""
    return re.sub(r"([\\`*_\[\]<>#|!])", r"\\\1", text)
