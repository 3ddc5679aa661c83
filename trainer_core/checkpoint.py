"""Checkpoints that are either whole or not there.

A checkpoint is written into a staging folder beside its final place, flushed to disk and renamed. A crash at any moment
leaves the previous checkpoints as they were, and at worst a staging folder that the next start removes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainer_core.rollout.state import RolloutState

STATE_FILE = "rollout_state.json"
STAGING_PREFIX = ".saving-"
REPLACED_PREFIX = ".replaced-"


def staging_folder(output_dir: Path, step: int) -> Path:
    """Where a checkpoint is put together, the same for all ranks, on the same file system as its final place."""
    folder = output_dir / f"{STAGING_PREFIX}{step}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(staged: Path, final: Path) -> None:
    """Flush a staged checkpoint to disk and move it to its final place, replacing one of the same name.

    The staging folder around it is removed.
    """
    for path in staged.rglob("*"):
        _flush(path)
    _flush(staged)
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    if final.exists():
        os.replace(final, replaced)
    os.replace(staged, final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(staged.parent, ignore_errors=True)


def remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed process left half written; put back a checkpoint whose replacement did not arrive."""
    if not output_dir.is_dir():
        return
    for path in output_dir.glob(f"{REPLACED_PREFIX}*"):
        original = path.with_name(path.name.removeprefix(REPLACED_PREFIX))
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.replace(path, original)
    for path in output_dir.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def latest(output_dir: Path) -> str:
    """The newest checkpoint folder. Raises ValueError when there is none."""
    from transformers.trainer_utils import get_last_checkpoint  # heavy, and rarely needed

    if (found := get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None) is None:
        raise ValueError(f"{output_dir} holds no checkpoint to resume from")
    return found


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save_rollout_state(folder: Path, state: RolloutState) -> None:
    (folder / STATE_FILE).write_text(state.to_json())


def load_rollout_state(folder: Path) -> RolloutState:
    """Raises ValueError with one sentence when the folder is no checkpoint of this trainer."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {STATE_FILE}; give the folder of a checkpoint that this trainer wrote")
    return RolloutState.from_json(path.read_text())


def starting_point(weights: Path, folder: Path, batch_size: int) -> Path:
    """A checkpoint of step 0 in `folder` with the weights or adapter of another run: new optimizer, every prompt to do.

    Its weight version is 1, so that generation waits until the servers have these weights rather than the base model's.
    `batch_size` is the trainer's per device, which transformers compares.
    """
    from transformers import TrainerState  # heavy, and rarely needed

    folder.mkdir(parents=True, exist_ok=True)
    for path in weights.iterdir():
        link = folder / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    TrainerState(train_batch_size=batch_size).save_to_json(str(folder / "trainer_state.json"))
    save_rollout_state(folder, RolloutState(weight_version=1))
    return folder


def write_adapter_card(
    folder: Path, *, base_model: str, auto_class: str, step: int, rewards: list[str], loss_type: str
) -> None:
    """README.md of an adapter folder, as the hub and PEFT users expect it. `auto_class` of transformers loads the base."""
    (folder / "README.md").write_text(
        f"""---
base_model: {base_model}
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- grpo
- reinforcement-learning
---

# LoRA adapter, step {step}

Trained with asynchronous GRPO ({loss_type} loss) on the reward {", ".join(rewards)}.

```python
from peft import PeftModel
from transformers import {auto_class}

base = {auto_class}.from_pretrained("{base_model}")
model = PeftModel.from_pretrained(base, "path/to/this/folder")
```
"""
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
