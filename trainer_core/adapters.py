"""How a LoRA adapter begins, and what that means for the model under it."""

from __future__ import annotations

from peft import PeftModel

PLAIN_INITS = (True, "gaussian", "eva", "orthogonal", "lora_ga")
"""Values of `init_lora_weights` that leave the base model alone and begin as nothing: base + adapter is the base.

LoRA-GA would move its start out of the base, by gradients that are attached to a model; Offbeat loads models by their path,
and without gradients peft begins as usual.
"""


def changes_base(model: PeftModel) -> bool:
    """Whether peft took part of the base's weights into the adapter (PiSSA, OLoRA, CorDA, LoftQ): without the adapter, the
    model is then no longer the one that was loaded.
    """
    return getattr(model.active_peft_config, "init_lora_weights", True) not in (*PLAIN_INITS, False, "mica")
