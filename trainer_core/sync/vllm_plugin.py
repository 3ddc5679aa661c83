"""Entry point that adds Offbeat's staged weight transfer to vLLM. Loaded by every vLLM process, so it stays light."""

from __future__ import annotations


def register() -> None:
    """Register the engines by name; loading one later is left to vLLM's factory."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, engine in {"gloo": "StagedGlooEngine", "nccl-staged": "StagedNcclEngine"}.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "trainer_core.sync.vllm_engine", engine)
