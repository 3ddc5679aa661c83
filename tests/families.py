"""Ask a real vLLM server about tiny models of supported families: does it say what the trainer computes, after pushes too?

    python -m tests.families [FAMILY ...] [--only weights|adapter] [--device cuda] [--logs FOLDER]

For whoever adds a family, or a version of vLLM or transformers. One line for each family and way of pushing: the largest
difference of a log-probability between server and trainer, of prompts and of tokens that the server sampled, with the weights
of the checkpoint and after pushes of weights that were all changed. Both compute in float32, except that a server on a CPU
computes Gated DeltaNet in bfloat16. Where a server does not start or answer, the last errors of its log; what would be pushed
is held to names and shapes of the checkpoint in any case. Exit code 1 when something does not agree.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from tests.agreement import NoAnswer, ask, difference, disturb, prompts
from tests.tiny_families import MAKERS, tiny_family
from tests.vllm_server import RunningServer, ServerEnded, running_server, tiny_spec
from trainer_core.families import DELTA_MODELS, adapt_text_only, has_vision
from trainer_core.model import load_policy
from trainer_core.spec import RunSpec
from trainer_core.sync import WeightSync, choose_sync
from trainer_core.sync.vllm_engine import checkpoint_shapes
from trainer_core.sync.weights import full_weights

LIMIT = 1e-3
"""Of the difference of a log-probability, as in tests/test_parity.py."""
COARSE_LIMIT = 0.6
"""The same where the server computes in bfloat16, which in random weights makes half of that also without a push."""
MOVED = 0.5
"""What a push must at least change of some log-probability; otherwise agreement would say nothing."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(MAKERS)}; all if none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what the server computes on")
    parser.add_argument("--only", choices=WAYS, help="one way of pushing, each of which takes a server of its own")
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' logs in")
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - set(MAKERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}")
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        logs = arguments.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for family in arguments.families or MAKERS:
            for way in [arguments.only] if arguments.only else WAYS:
                for line, good in WAYS[way](family, arguments.device, logs):
                    print(f"{family:18} {way:8} {line}", flush=True)
                    failed |= not good
    return int(failed)


Found = Iterator[tuple[str, bool]]
"""Lines to print, and whether each is as it should be."""


def by_weights(family: str, device: Any, logs: Path) -> Found:
    """Full weights, then an adapter merged into them, to one server."""
    model, folder, log = policy(family), tiny_family(family), logs / f"{family}.log"
    yield from names_and_shapes(model, folder)
    try:
        with running_server(spec_of(family), folder, log, device=device, extra=extra(family)) as server:
            sync = opened(model, server, logs)
            yield compared("as loaded", server, sync, model, 0)
            disturb(model, 1)
            yield pushed("full", server, sync, model, 1)
            sync.close()
            adapted = with_adapter(model)
            sync = opened(adapted, server, logs)
            disturb(adapted, 2)
            yield pushed("merged LoRA", server, sync, adapted, 2)
            sync.close()
    except (ServerEnded, NoAnswer):
        yield refusal(log), False


def by_adapter(family: str, device: Any, logs: Path) -> Found:
    adapted, log = with_adapter(policy(family)), logs / f"{family}-adapter.log"
    spec = spec_of(family, lora={"enabled": True, "r": 8, "push": "adapter"}, rollout={"max_staleness": 1})
    try:
        with running_server(spec, tiny_family(family), log, device=device, extra=extra(family)) as server:
            sync = opened(adapted, server, logs)
            disturb(adapted, 3)
            yield pushed(f"LoRA by {type(sync).__name__}", server, sync, adapted, 1)
            sync.close()
    except (ServerEnded, NoAnswer):
        yield refusal(log), False


def spec_of(family: str, **sections: dict[str, object]) -> RunSpec:
    return tiny_spec(server={"dtype": "bfloat16" if coarse(family) else "float32"}, **sections)


def coarse(family: str) -> bool:
    """Whether vLLM computes it on a CPU in bfloat16 only: Gated DeltaNet."""
    text: Any = AutoConfig.from_pretrained(tiny_family(family)).get_text_config()
    return text.model_type in DELTA_MODELS


def extra(family: str) -> list[str]:
    """Tiny models have no image processor, which a server wants unless it is told that there will be no images."""
    return ["--language-model-only"] if has_vision(AutoConfig.from_pretrained(tiny_family(family))) else []


def policy(family: str) -> Any:
    model: Any = load_policy(str(tiny_family(family)), dtype="float32", trust_remote_code=False, init_kwargs=None)
    return model


def with_adapter(model: Any) -> Any:
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapt_text_only(config, model))


def opened(model: Any, server: RunningServer, logs: Path) -> WeightSync:
    config: Any = SimpleNamespace(
        weight_sync_timeout=120.0, max_staleness=1, output_dir=str(logs / "run"), run_name="families"
    )
    sync = choose_sync(config=config, model=model, server_urls=[server.url])
    sync.open()
    return sync


def names_and_shapes(model: Any, folder: Path) -> Found:
    """Whether all that would be pushed stands in the checkpoint the same way, and nothing of what is frozen."""
    known = checkpoint_shapes(str(folder), None)
    weights = full_weights(model)
    wrong = [weight.name for weight in weights if known.get(weight.name) != list(weight.shape)]
    text = f"{len(weights)} of the checkpoint's {len(known)} tensors are pushed"
    yield text + (f", {len(wrong)} of them unknown to it: {', '.join(wrong[:3])}" if wrong else ""), not wrong


def compared(what: str, server: RunningServer, sync: WeightSync, model: Any, version: int) -> tuple[str, bool]:
    found = difference(ask(server.url, sync.model_name(version), prompts()), model)
    limit = COARSE_LIMIT if coarse(model.config.model_type) else LIMIT
    return f"{what}: {found:.1e}", found < limit


def pushed(what: str, server: RunningServer, sync: WeightSync, model: Any, version: int) -> tuple[str, bool]:
    before = difference(ask(server.url, sync.model_name(version - 1), prompts()), model)
    try:
        sync.push(model, version)
    except RuntimeError as error:
        return f"{what}: {error}", False
    line, good = compared(what, server, sync, model, version)
    return f"{line} (before the push {before:.2f})", good and before > MOVED


def refusal(log: Path) -> str:
    """The last errors that a server's log names."""
    errors = list(dict.fromkeys(re.findall(r"\b\w+Error: .*", log.read_text(errors="replace"))))
    return f"NO SERVER: {'; '.join(errors[-3:]) or 'its log names no error'}"


WAYS = {"weights": by_weights, "adapter": by_adapter}

if __name__ == "__main__":
    raise SystemExit(main())
