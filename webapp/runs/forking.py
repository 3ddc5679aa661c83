"""Forks: a new run that begins with the weights of another run's checkpoint, and with settings of its own.

Step 0, a new optimizer and every prompt still to do: that is what the weights alone allow. An adapter fits only the model
it was trained on and its own shape, so these settings must stay; everything else may change.
"""

from __future__ import annotations

import os
import shutil

from trainer_core.spec import RunSpec
from webapp.checkpoints import files
from webapp.checkpoints.models import Checkpoint
from webapp.runs.models import Run
from webapp.runs.problems import Problem

ADAPTER_SHAPE = ("r", "alpha", "target_modules")


def problems(spec: RunSpec, checkpoint: Checkpoint) -> list[Problem]:
    """Why a run with this spec can't begin with the checkpoint's weights, one sentence for each field; empty when it can."""
    origin = checkpoint.run.run_spec()
    where = f"step {checkpoint.step} of {checkpoint.run.name}"
    found = []
    if not any(file.part == "model" for file in files.listing(checkpoint)):
        found.append(Problem("", f"The weights of {where} are not on this machine, so nothing can begin with them."))
    if spec.model.path != origin.model.path:
        text = f"A fork keeps the model of {where}, {origin.model.path}; found {spec.model.path}."
        found.append(Problem("model.path", text))
    if checkpoint.kind == Checkpoint.Kind.ADAPTER:
        if not spec.lora.enabled:
            found.append(Problem("lora.enabled", f"S{where[1:]} is a LoRA adapter, which can't become full weights "
                                 "here; leave LoRA on."))  # fmt: skip
        for name in ADAPTER_SHAPE if spec.lora.enabled else ():
            there, here = getattr(origin.lora, name), getattr(spec.lora, name)
            if here != there:
                found.append(Problem(f"lora.{name}", f"The adapter of {where} has {name} {there}; found {here}, which would "
                                     "not fit it."))  # fmt: skip
    elif spec.lora.enabled:
        found.append(Problem("lora.enabled", f"S{where[1:]} holds full weights; turn LoRA off, or start a new run "
                             "with the downloaded folder as its model to train an adapter on it."))  # fmt: skip
    return found


def same_weights(before: RunSpec, after: RunSpec) -> bool:
    """Whether weights made for one spec fit the other: the same model, and the same adapter or none."""
    shape = ("enabled", *ADAPTER_SHAPE)
    return before.model.path == after.model.path and all(
        getattr(before.lora, name) == getattr(after.lora, name) for name in shape
    )


def copy_weights(checkpoint: Checkpoint, run: Run) -> None:
    """Give the run its own copy of the weights; hard links where the file system allows, which take no space."""
    for file in files.listing(checkpoint):
        if file.part != "model":
            continue
        target = run.starting_weights / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.path, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(file.path, target)
