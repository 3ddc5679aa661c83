"""What a playground server is started with: the run's own server settings, for conversations instead of rollouts."""

from __future__ import annotations

from trainer_core.spec import RunSpec

SIDES = 2
"""Conversations beside each other, and so adapters in use at a time."""


def talking_spec(spec: RunSpec, *, adapters: bool) -> RunSpec:
    """The run's spec with one server that takes adapters, on a CPU too, or with one of whole weights that takes none."""
    spec = spec.model_copy(update={"resources": spec.resources.model_copy(update={"server_replicas": 1})})
    if not adapters:
        return spec.model_copy(update={"lora": spec.lora.model_copy(update={"enabled": False})})
    lora = spec.lora.model_copy(update={"push": "adapter"})
    # The server's room for adapters is two more than the staleness (webapp/runs/commands.py).
    rollout = spec.rollout.model_copy(update={"max_staleness": SIDES - 2})
    server = spec.server.model_copy(update={"api_servers": 1})  # several do not load adapters
    return spec.model_copy(update={"lora": lora, "rollout": rollout, "server": server})
