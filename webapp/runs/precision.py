"""Where bfloat16 is slow: on processors that have no instructions for it. Their workers report that."""

from __future__ import annotations

from trainer_core.spec import RunSpec
from webapp.hosts.offers import Offer, offers


def warning(spec: RunSpec, offer: Offer | None) -> str:
    """One sentence where the run would go to a processor without instructions for the bfloat16 it asks for; else ""."""
    slow = [name for name, used in (("server.dtype bfloat16", spec.server.dtype == "bfloat16"),
                                    ("model.dtype bfloat16", spec.model.dtype == "bfloat16"),
                                    ("training.bf16", spec.training.bf16)) if used]  # fmt: skip
    if not slow or offer is None or not _lacks_bf16(offer):
        return ""
    return (
        f"The processor of {offer.host.name} has no bfloat16 instructions, so {' and '.join(slow)} "
        f"take{'s' * (len(slow) == 1)} ten times as long or more here; choose float32."
    )


def fitted(spec: RunSpec) -> RunSpec:
    """Settings to begin with: in float32 where every host that takes runs is slow in bfloat16."""
    taking = [offer for offer in offers() if offer.takes_runs]
    if not taking or not all(_lacks_bf16(offer) for offer in taking):
        return spec
    server = spec.server.model_copy(update={"dtype": "float32"})
    return spec.model_copy(update={"server": server, "training": spec.training.model_copy(update={"bf16": False})})


def _lacks_bf16(offer: Offer) -> bool:
    return offer.is_cpu and offer.host.bf16 is False
