"""The training library: asynchronous GRPO with generation and training overlapped.

Light names (`spec`, `metrics`, `spool`) import neither torch nor transformers; the trainer's names are loaded on first use, so
that the web app and the workers may import this package without paying for, or even having, torch.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "AsyncGRPOConfig": "trainer_core.config",
    "AsyncGRPOTrainer": "trainer_core.trainer",
    "AsyncRolloutLoop": "trainer_core.rollout.loop",
    "packed_log_probs": "trainer_core.model",
    "Rollout": "trainer_core.rollout.types",
    "RolloutGroup": "trainer_core.rollout.types",
    "TurnRecord": "trainer_core.rollout.types",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
