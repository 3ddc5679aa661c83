"""Entry point that adds Offbeat's gloo weight transfer to vLLM. Loaded by every vLLM process, so it stays light."""

from __future__ import annotations


def register() -> None:
    """Register the engine under the name "gloo"; loading it later is left to vLLM's factory."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "trainer_core.sync.vllm_engine", "StagedGlooEngine")
